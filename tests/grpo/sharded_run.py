"""Run by `test_sharded.py` under torchrun: every rank makes the same updates; rank 0 saves what came of them."""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.offload import Offloader


def gradients(given, groups) -> dict:
    """Whole gradients of one update that is not made, and its metrics."""
    learner = GRPOLearner(copy.deepcopy(given["decoder"]), given["config"], given["decoder"], mesh=given["mesh"])
    kept = {}
    learner._optimizer.step = lambda: kept.update(
        gradient=torch.cat([p.grad.full_tensor().flatten() for p in learner.weights.parameters()])
    )
    kept["metrics"] = learner.update(groups)
    return kept


def trajectory(given) -> dict:
    """Two updates and a turn off the device; then one more, also by a learner that continues from a saved state."""
    make = lambda: GRPOLearner(copy.deepcopy(given["decoder"]), given["config"], given["decoder"], mesh=given["mesh"])
    learner = make()
    for groups in given["groups"][:2]:
        learner.update(groups)
    state = learner.state()
    sent = {name: tensor.clone() for name, tensor in learner.weights.named_compute_weights()}
    offloader = Offloader(pinned=False)
    freed = offloader.offload(learner.movables())
    offloader.restore()
    learner.update(given["groups"][2])
    again = make()
    again.load_state(copy.deepcopy(state))
    again.update(given["groups"][2])
    return {"state": state, "sent": sent, "last": learner.state(), "again": again.state(), "freed": freed}


def main(source: str, target: str) -> None:
    torch.set_num_threads(1)
    given = torch.load(source, weights_only=False)
    given["mesh"] = init_device_mesh("cpu", (2,))
    found = {"several": gradients(given, given["groups"][0]), "single": gradients(given, given["lonely"])}
    found |= trajectory(given)
    if dist.get_rank() == 0:
        torch.save(found, target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
