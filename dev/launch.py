"""Starts a program on several ranks of this machine with mpirun, quick and quiet (dev/demo.py, tests).

    from launch import command, environment
    subprocess.run(command(2, ["./train_mlp", "-z", "1"]), env=environment())

    dev/launch.py 2 ./train_mlp -z 1

mpirun is the one that dev/deps.sh put into .venv for want of one that works, else the one in PATH.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent

MPI_SETTINGS = {
    # Open MPI does not start as root unless told twice; PRTE is the launcher of Open MPI 5.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Shared memory only, and no search for networks: a start takes 0.19 s in place of 0.36.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_plm_rsh_agent": "/bin/false",
    # Ranks may be more than cores: do not pin them, and let a waiting one yield.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def mpi_tool(name):
    """The path of mpirun or mpicc, or None."""
    return shutil.which(str(TOP / ".venv/bin" / name)) or shutil.which(name)


def mpirun():
    return mpi_tool("mpirun")


@functools.cache
def gpus():
    """How many GPUs this machine has."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


# NCCL takes several ranks on one GPU if each has a host name of its own and they talk over the loopback.
SHARE_GPU = ["sh", "-c", 'NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK NCCL_SOCKET_IFNAME=lo exec "$@"', "sh"]


def command(ranks, args):
    """The command line that runs args on `ranks` ranks; 0 or None: args as they are, without mpirun."""
    args = [str(arg) for arg in args]
    if ranks and 0 < gpus() < ranks:
        args = SHARE_GPU + args
    return [mpirun(), "--oversubscribe", "-np", str(ranks), *args] if ranks else args


def environment(extra=None):
    """The environment of this process with the settings above, then extra; None there removes a variable."""
    merged = {**MPI_SETTINGS, **os.environ, **(extra or {})}
    return {name: str(value) for name, value in merged.items() if value is not None}


if __name__ == "__main__":
    words = command(int(sys.argv[1]), sys.argv[2:])
    os.execvpe(words[0], words, environment())
