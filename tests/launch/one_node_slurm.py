"""SLURM on this machine alone: its daemons, with configuration, ports and folders of their own."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "sinfo")

SETTINGS = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={control}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES OverSubscribe=FORCE State=UP
"""


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
    configuration.write_text(SETTINGS.format(host=host, folder=folder, **ports))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    daemons = [
        [
            *(program("munged"), "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"),
        ],
        [program("slurmctld"), "-D", "-f", str(configuration)],
        [program("slurmd"), "-D", "-f", str(configuration), "-N", host],
    ]
    started = []
    try:
        for command in daemons:
            with (folder / f"daemon{len(started)}.out").open("w") as out:
                started.append(subprocess.Popen(command, stdout=out, stderr=out, env=environment))
            if len(started) == 1:
                _wait_for((folder / "munge.socket").exists, folder)
        _wait_for(lambda: _state(environment) == "idle", folder)
        yield environment
    finally:
        for daemon in reversed(started):
            daemon.terminate()
        for daemon in reversed(started):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
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
