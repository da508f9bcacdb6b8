"""Makes flight recorder dumps as NCCL's watchdog and `grid.watch` write them."""

import json
import pickle

from hypercomm import RankLayout
from hypercomm.blame.analysis import Verdict
from hypercomm.blame.evidence import read_folder

STATES = {"done": "completed", "runs": "started", "queued": "scheduled"}


def blame(folder, layout=None):
    """Return the verdict on the dumps of a folder."""
    return Verdict(read_folder(folder, layout and RankLayout(layout)))


class Dumps:
    """The dumps of a job. `call` adds a collective of a rank, `write` writes all dumps."""

    def __init__(self, ranks):
        self.ranks = range(ranks)
        self.groups = {"WORLD": ("0", "default_pg", list(self.ranks))}
        self.entries = {rank: [] for rank in self.ranks}

    def group(self, name, dims, ranks):
        """Add a group."""
        self.groups[name] = (name, dims, list(ranks))

    def group_over(self, dims, rank):
        """Return the name of a rank's group over dims."""
        every = self.groups.items()
        return next(name for name, one in every if one[1] == dims and rank in one[2])

    def call(self, rank, group, op="all_reduce", sizes=(4,), dtype="Float", state="done", **more):
        """Add a collective of a group to the dump of one rank."""
        name, desc, _ = self.groups[group]
        entries = self.entries[rank]
        number = sum(e["process_group"] == (name, desc) for e in entries) + 1
        entries.append(
            {
                "frames": [
                    {"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 1},
                    {"name": "step", "filename": "train.py", "line": 40 + number},
                ],
                "record_id": len(entries),
                "pg_id": int(name) if name.isdecimal() else 1,
                "process_group": (name, desc),
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "profiling_name": f"nccl:{op}",
                "input_sizes": [list(sizes)],
                "input_dtypes": [dtype],
                "output_sizes": [list(sizes)],
                "state": STATES[state],
                "is_p2p": False,
                **more,
            }
        )

    def message(self, rank, group, way, peer, **more):
        """Add a message to or from a peer. `peer` is the position of the peer in the group."""
        own = self.groups[group][2].index(rank)
        arrow = "->" if way == "send" else "<-"
        count = sum(e["is_p2p"] for e in self.entries[rank]) + 1
        self.call(rank, group, f"{way} {own}{arrow}{peer}", is_p2p=True, p2p_seq_id=count, **more)

    def content(self, rank):
        """Return the content of the dump of a rank."""
        config = {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, desc, ranks in self.groups.values()
            if rank in ranks
        }
        return {"version": "2.10", "pg_config": config, "entries": self.entries[rank]}

    def write_watched(self, folder, layout, states, stacks):
        """Write the dumps of ranks with a watch, and return the folder.

        Args:
            folder: The folder.
            layout: The layout of the grid.
            states: The reason of each rank's dump.
            stacks: The stack of each rank's main thread as (file, function), innermost first.
        """
        layouts = {"": RankLayout(layout).to_dict()}
        for rank, why in states.items():
            stack = [{"filename": file, "line": 1, "name": name} for file, name in stacks[rank]]
            counts = {}
            for entry in self.entries[rank]:
                counts.setdefault(entry["process_group"][0], {})[""] = entry["collective_seq_id"]
            process = {"host": "a", "why": why, "layouts": layouts, "counts": counts}
            content = {**self.content(rank), "hypercomm": {**process, "stack": stack}}
            (folder / f"hypercomm_watch_{rank}.json").write_text(json.dumps(content))
        return folder

    def write(self, folder, but=()):
        """Write the dumps of all ranks except `but`, and return the folder."""
        for rank in self.ranks:
            if rank not in but:
                content = pickle.dumps(self.content(rank), protocol=2)
                (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
        return folder


def job(tp=2, dp=2, calls=1):
    """Return the dumps of tp=2,dp=2, with `calls` completed calls over each group."""
    dumps = Dumps(tp * dp)
    layout = RankLayout([tp, dp], ["tp", "dp"])
    for dims in layout.dim_names:
        for index, ranks in enumerate(layout.groups(dims)):
            dumps.group(f"{dims}{index}", dims, ranks)
            for rank in ranks:
                for _ in range(calls):
                    dumps.call(rank, f"{dims}{index}")
    return dumps
