"""SLURM on this machine alone: its daemons, with configuration, ports and folders of their own."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "sinfo")


def program(name):
    """Where a program is; daemons are not on everyone's path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def why_not():
    """Say why it cannot run here; None where it can."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd starts ranks only as root"


@contextlib.contextmanager
def one_node_slurm(folder):
    """Start the daemons; gives the environment in which srun and its like find them."""
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o700)
    key, configuration = folder / "key", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    ports = {"control": free_port(), "node": free_port()}
    template = Path(__file__).with_name("slurm.conf").read_text()
    configuration.write_text(template.format(host=host, folder=folder, **ports))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    munge = {"socket": "munge.socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}"]
        + [f"--{option}={folder}/{name}" for option, name in munge.items()],
        ["slurmctld", "-D", "-f", str(configuration)],
        ["slurmd", "-D", "-f", str(configuration), "-N", host],
    ]
    started = []
    try:
        for name, *arguments in daemons:
            with (folder / f"{name}.out").open("w") as out:
                streams = {"stdout": out, "stderr": out, "env": environment}
                started.append(subprocess.Popen([program(name), *arguments], **streams))
            if name == "munged":
                _wait_for((folder / "munge.socket").exists, folder)
        _wait_for(lambda: _state(environment) == "idle", folder)
        yield environment
    finally:
        for daemon in reversed(started):
            daemon.kill()
            daemon.wait()


def _state(environment):
    command = [program("sinfo"), "-h", "-o", "%t"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip().rstrip("*")


def _wait_for(is_true, folder, seconds=60):
    end = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > end:
            logs = {path.name: path.read_text()[-2000:] for path in folder.glob("*.[lo][ou][gt]")}
            raise TimeoutError(f"SLURM has not come up in {seconds} s: {logs}")
        time.sleep(0.1)
