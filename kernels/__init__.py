# Imported as `kv4rl.kernels` (pyproject maps it), never as `kernels`: that name belongs to a PyPI package.
