"""The drop-ins for torchrl. Nothing here imports torchrl at module level, but for the updater's registration."""
