"""Extensions of a user for tests/distributed/test_extensions.py. The code has no ranks."""

import torch
from pydantic import BaseModel
from torch.nn import functional as F

from torchtitan_like.extensions import register_section

NUM_DOCUMENTS = 3000


@register_section("own")
class Own(BaseModel):
    trust: float = 0.02
    z_weight: float = 0.001


class Lars(torch.optim.Optimizer):
    """The step of each parameter has a norm in proportion to the parameter's norm."""

    def __init__(self, groups, settings):
        super().__init__(groups, {})
        self.trust = settings["own"].trust
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"mean": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p]["mean"]
                mean.lerp_(p.grad, 0.5)
                ratio = self.trust * p.norm() / (mean.norm() + 1e-12)
                p.sub_(mean * ratio)


def with_z(logits, labels, settings):
    z = torch.logsumexp(logits, -1)
    return F.cross_entropy(logits, labels, reduction="none") + settings["own"].z_weight * z * z


class Numbers:
    fingerprint = "numbers, version 1"

    def __init__(self, path, settings):
        self.prefix = path

    def __len__(self):
        return NUM_DOCUMENTS


def record(prefix, index):
    numbers = " ".join(str(index * i) for i in range(2, 5 + index % 9))
    return {"question": f"{prefix} {index}: ", "answer": numbers}


class Map(Numbers):
    def __getitem__(self, index):
        return record(self.prefix, index)


class Iterable(Numbers):
    def __iter__(self):
        return (record(self.prefix, index) for index in range(NUM_DOCUMENTS))


def answers(record, settings):
    return [(record["question"], False), (record["answer"], True)]
