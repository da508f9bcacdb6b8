"""Four actors of Ray that join one job; prints what each found."""

import json
import os
import socket

import ray


@ray.remote(num_cpus=0)
class Rank:
    """One rank of the job."""

    def place(self):
        """The address of this actor's host, and a free port there."""
        with socket.create_server(("", 0)) as server:
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def run(self, rank, address, port):
        """Join, communicate, leave."""
        from ranks.join_ranks import joined

        return joined(rank=rank, size=4, address=address, port=port)


def main():
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    paths = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    actors = [Rank.remote() for _ in range(4)]
    address, port = ray.get(actors[0].place.remote())
    joined = ray.get([actor.run.remote(rank, address, port) for rank, actor in enumerate(actors)])
    ray.shutdown()
    print(json.dumps(joined), flush=True)


if __name__ == "__main__":
    main()
