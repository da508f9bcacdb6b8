"""Programs of several ranks, of which one makes a mistake. Ranks import this file quickly."""

import os
import random
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid

KINDS = ["raise", "exit", "kill", "hang", "shape", "skip", "unpicklable"]
HOW = ["plain", "with", "thread", "destructor"]


def reduce_first(size):
    dist.all_reduce(torch.ones(size))


def reduce_second(size):
    dist.all_reduce(torch.ones(size))


def reduce_third(size):
    dist.all_reduce(torch.ones(size))


STEPS = [reduce_first, reduce_second, reduce_third]


class Destructor:
    def __init__(self, function):
        self.function = function

    def __del__(self):
        self.function()


def act(kind, how):
    """Make a mistake, and return the size of the tensor for the collective of this step."""
    if kind == "raise":
        raise ValueError("planted")
    if kind == "exit" and how in ("plain", "with"):
        sys.exit("planted")
    if kind == "exit":
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(600)
    return 40_000 if kind == "shape" else 4


def program(kind, how, odd, at):
    """Run three collectives. Rank `odd` makes a mistake in the one with index `at`."""
    is_odd = dist.get_rank() == odd

    def step(number):
        is_wrong = is_odd and number == at
        if not (is_wrong and kind == "skip"):
            STEPS[number](act(kind, how) if is_wrong else 4)

    def steps():
        for number in range(3):
            if how == "thread" and number == at:
                thread = threading.Thread(target=step, args=[number])
                thread.start()
                thread.join()
            elif how == "destructor" and number == at:
                del_soon = Destructor(lambda number=number: step(number))
                del del_soon
            else:
                step(number)

    if how == "with":
        with HyperCommGrid("tp=-1") as grid:
            grid.create_pg("tp")
            steps()
            grid["tp"].barrier()
    else:
        steps()
    return threading.Lock() if is_odd and kind == "unpicklable" else dist.get_rank()


def draw_programs(seed, count):
    drawn = random.Random(seed)
    for number in range(count):
        size = drawn.randint(2, 6)
        kind = KINDS[number % len(KINDS)]
        yield size, (kind, drawn.choice(HOW), drawn.randrange(size), drawn.randrange(3))
