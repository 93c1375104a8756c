"""What rivals are called, in files and in tables. Imports nothing, so that results can be read anywhere."""

TITLES: dict[str, str] = {
    "shmsync": "shmsync",
    "shmsync-memory": "shmsync, notify=memory",
    "shmsync-checksum": "shmsync, checksum=True",
    "torchrl-updater": "torchrl RPCWeightUpdater",
    "torchrl-rpc-scheme": "torchrl RPCWeightSyncScheme",
    "torchrl-shared-mem": "torchrl SharedMemWeightSyncScheme",
    "torchrl-multi-process": "torchrl MultiProcessWeightSyncScheme",
    "gloo": "gloo broadcast",
    "lock": "shared module under a lock",
    "ray": "Ray object store",
    "roofline": "one plain copy",
    "torch": "torch",
}
OURS = ("shmsync", "shmsync-memory")
# These go on before any worker has confirmed.
UNCONFIRMED = ("shmsync-memory", "lock")
