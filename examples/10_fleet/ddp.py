"""Several ranks under `torchrun`: each learns from its own rows, and all make the same update."""

import os

import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch.nn.parallel import DistributedDataParallel

from groupwise.jobs.hosts.seal import seal

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
rank, world = dist.get_rank(), dist.get_world_size()
device = "cuda" if cuda else "cpu"

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
begin = 0
if resume := os.environ.get("RESUME_FROM"):
    load_model(model.module, f"{resume}/model.safetensors", device=device)
    begin = int(resume.rpartition("-")[2])
    print(f"goes on after step {begin}", flush=True)

for step in range(begin + 1, 9):
    x = torch.full((1, 4), float(rank + 1), device=device)
    loss = (model(x) - 1).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)
    if rank == 0 and step % 4 == 0:
        folder = f"{os.environ['GROUPWISE_OUTPUT']}/checkpoint-{step}"
        os.makedirs(folder, exist_ok=True)
        save_model(model.module, f"{folder}/model.safetensors")
        seal(folder, step)
    if os.environ["ATTEMPT"] == "0" and step == int(os.environ.get("FAIL_AT", "0")):
        raise SystemExit("fails, to show what follows")

same = torch.stack([model.module.weight.detach().sum(), -model.module.weight.detach().sum()])
dist.all_reduce(same, op=dist.ReduceOp.MAX)
assert same.sum() == 0, "the ranks have parted"
print(f"rank {rank} of {world}: the same weights", flush=True)
dist.destroy_process_group()
