"""A model family at small sizes, and the comparisons with transformers that all families share."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.hf_weights import (
    gradients_per_expert,
    load_hf,
    load_per_expert,
    to_external,
    to_native,
)
from torchtitan_like.checkpoint.errors import with_checkpoint_errors
from torchtitan_like.checkpoint.hf.export import write_export
from torchtitan_like.checkpoint.hf.folder import write_folder
from torchtitan_like.checkpoint.stateful import ModelState
from torchtitan_like.distributed.initialize import initialize, materialize
from torchtitan_like.distributed.world import HostGroup
from torchtitan_like.models import get_spec, resolve_args
from torchtitan_like.models.hf_table import Link, links
from torchtitan_like.models.layers.moe import Router
from torchtitan_like.models.spec import has_experts

# Tokens whose last chosen and first rejected score are closer than this may choose other experts than in transformers.
CLEAR_GAP = 1e-6


class Family:
    """A registered family at the sizes of one test module.

    flavor, sizes: of the models that `build` returns.
    redrawn: pattern of parameters and buffers -> standard deviation of the values that `perturb`
        gives them.
    factor: by which `perturb` multiplies the other weights of layers.
    hf_router: the end of the names of transformers' routers.
    hf_options: further arguments of transformers' configuration.
    """

    def __init__(
        self,
        name: str,
        flavor: str,
        sizes: Mapping[str, Any],
        *,
        redrawn: Mapping[str, float] | None = None,
        factor: float = 1.0,
        hf_router: str = "mlp.gate",
        hf_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = get_spec(name)
        self.flavor = flavor
        self.sizes = dict(sizes)
        self.redrawn = {"*.router.*": 0.3, **(redrawn or {})}
        self.factor = factor
        self.hf_router = hf_router
        self.hf_options = dict(hf_options or {})

    # ---- models

    def build(
        self,
        overrides: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> tuple[Any, Any]:
        """Return the arguments and the initialized model."""
        args = resolve_args(self.spec, self.flavor, {**self.sizes, **(overrides or {})})
        with torch.device("meta"):
            model = self.spec.build(args).to(dtype)
        materialize(model, torch.device("cpu"))
        initialize(model, self.spec.init_table(args), seed)
        return args, model

    @torch.no_grad()
    def perturb(self, model: nn.Module) -> None:
        """Make norms, scores, and hidden units differ widely, so that any fault shows."""
        generator = torch.Generator().manual_seed(2)
        for name, weight in model.state_dict().items():
            std = next((std for p, std in self.redrawn.items() if fnmatchcase(name, p)), None)
            if name.endswith("norm.weight"):
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
            elif std is not None:
                weight.copy_(std * torch.randn(weight.shape, generator=generator))
            elif "layers" in name:
                weight.mul_(self.factor)

    def some_tokens(self, args: Any, batch: int = 2, seq: int = 49) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, args.vocab_size, (batch, seq), generator=generator)

    # ---- weights with external names

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint of the model."""
        return {name: tensor.detach() for name, tensor in ModelState([model]).state_dict().items()}

    def table(self, args: Any, model: nn.Module) -> list[Link]:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state(model).items()}
        return list(links(self.spec.hf_names(args), shapes, self.spec.tied(args)))

    def hf_state(self, args: Any, model: nn.Module) -> dict[str, Tensor]:
        return to_external(self.table(args, model), self.state(model))

    def hf_model(self, args: Any, model: nn.Module) -> Any:
        """Return the same model of transformers."""
        transformers = pytest.importorskip("transformers")
        config = self.spec.hf_config(args)
        model_class = getattr(transformers, config["architectures"][0])
        hf_model = model_class(model_class.config_class(**config, **self.hf_options))
        load_per_expert(hf_model, self.hf_state(args, model))
        return hf_model

    def export(self, folder: Path, args: Any, model: nn.Module, dtype: torch.dtype) -> None:
        """Write the weights as a run with one rank exports them."""
        write_export(
            folder,
            self.state(model),
            rows=self.spec.hf_names(args),
            tied=self.spec.tied(args),
            dtype=dtype,
            group=HostGroup.alone(),
        )

    def load(self, folder: Path, args: Any, model: nn.Module, quantized: bool = False) -> Any:
        """Read weights as a run with one rank reads them; return the report."""
        alternative_names = self.spec.hf_alternative_names
        return load_hf(
            folder,
            self.state(model),
            rows=self.spec.hf_names(args),
            tied=self.spec.tied(args),
            quantized=quantized,
            group=with_checkpoint_errors(HostGroup.alone()),
            alternative_rows=alternative_names(args) if alternative_names else None,
            unread=self.spec.hf_unread(args),
        )

    # ---- bodies of tests

    def assert_equal_states(self, actual: nn.Module, expected: nn.Module) -> None:
        expected_state = self.state(expected)
        for name, tensor in self.state(actual).items():
            assert tensor.dtype == expected_state[name].dtype, name
            assert torch.equal(tensor, expected_state[name]), name

    def assert_an_export_is_read_back(self, folder: Path, dtype: torch.dtype) -> None:
        args, model = self.build(dtype=dtype)
        self.perturb(model)
        self.export(folder, args, model, dtype)
        _, loaded_model = self.build(dtype=dtype, seed=1)
        assert self.load(folder, args, loaded_model).unused == ()
        self.assert_equal_states(loaded_model, model)

    def assert_transformers_reads_an_export(
        self, folder: Path, assets: Path, overrides: Mapping[str, Any]
    ) -> None:
        """Nothing is missing or unexpected; tensors, sizes, and logits are equal."""
        transformers = pytest.importorskip("transformers")
        from safetensors.torch import save_file

        args, model = self.build({"vocab_size": 2048, **overrides})
        self.perturb(model)
        config = self.spec.hf_config(args)
        stored = self.hf_state(args, model)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        write_folder(folder, config=config, dtype=torch.float32, assets=assets, bos=None, eos=None)
        hf_model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype="auto", **self.hf_options
        )
        assert type(hf_model).__name__ == config["architectures"][0]
        assert not any(report.values()), report
        for name, tensor in hf_model.state_dict().items():  # it stacks the experts of some families
            assert name not in stored or torch.equal(tensor, stored[name]), name
        read = hf_model.config.to_dict()
        assert read["rope_parameters"]["rope_theta"] == args.rope_theta
        assert config["rope_scaling"] or read["rope_parameters"]["rope_type"] == "default"
        same = config.keys() & read.keys() - {"rope_scaling"}
        assert {key: read[key] for key in same} == {key: config[key] for key in same}
        tokens = self.some_tokens(args)
        with torch.no_grad():
            assert (hf_model(tokens).logits - model(tokens)).abs().max() <= 1e-5

    def assert_equals_transformers(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, overrides: Mapping[str, Any]
    ) -> None:
        """Compare logits, routing and gradients in float32, with weights from `save_pretrained`.

        Prints the tokens that choose other experts because their last chosen and first rejected score nearly tie.
        """
        args, model = self.build(overrides)
        self.perturb(model)
        hf_model = self.hf_model(args, model)
        hf_model.save_pretrained(folder)
        with torch.no_grad():
            for tensor in self.state(model).values():
                tensor.fill_(torch.nan)
        self.load(folder, args, model)
        tokens = self.some_tokens(args)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        gaps, own_choices = _trace_routers(monkeypatch)
        hf_choices = self._trace_hf_routers(hf_model)
        logits, reference = model(inputs), hf_model(inputs).logits
        num_layers = sum(isinstance(module, Router) for module in model.modules())
        assert num_layers == len(own_choices) == len(hf_choices)
        assert (num_layers > 0) == has_experts(self.spec, args)
        for layer, (gap, own, hf) in enumerate(zip(gaps, own_choices, hf_choices, strict=True)):
            is_clear = gap > CLEAR_GAP
            assert is_clear.float().mean() > 0.95
            differs = (own != hf).any(-1)
            for token in (differs & ~is_clear).nonzero().flatten().tolist():
                experts = [row[token].nonzero().flatten().tolist() for row in (own, hf)]
                print(
                    f"MoE layer {layer}, token {token}: experts {experts[0]} instead of "
                    f"{experts[1]}; gap {gap[token]:.1e}"
                )
            assert not (differs & is_clear).any()
        assert reference.std() > 0.3
        assert (logits - reference).abs().max() <= 1e-5
        model(inputs, labels).backward()
        F.cross_entropy(reference.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        self._assert_equal_gradients(args, model, hf_model)

    def _trace_hf_routers(self, hf_model: Any) -> list[Tensor]:
        """Return a list that the forward fills with masks (tokens, experts) of the choices."""
        choices: list[Tensor] = []

        def record(module: Any, inputs: Any, outputs: Any) -> None:
            choices.append(_hf_choices(outputs))

        for name, module in hf_model.named_modules():
            if name.endswith(self.hf_router):
                module.register_forward_hook(record)
        return choices

    def _assert_equal_gradients(self, args: Any, model: nn.Module, hf_model: Any) -> None:
        parameters = dict(model.named_parameters())
        pairs = [link for link in self.table(args, model) if link.native in parameters]
        gradients = {name: p.grad for name, p in hf_model.named_parameters()}
        if not {link.external for link in pairs} <= gradients.keys():
            gradients = gradients_per_expert(hf_model)
        expected = to_native(pairs, gradients, parameters)
        # A single normalized weight is 1, whatever its score is.
        has_constant_weights = any(
            module.top_k == 1 and module.normalize
            for module in model.modules()
            if isinstance(module, Router)
        )
        for name, parameter in parameters.items():
            if ".router." in name and has_constant_weights:
                continue
            assert parameter.grad is not None, name
            error = (parameter.grad - expected[name]).norm()
            assert error <= 1e-5 * expected[name].norm(), name


# ---- routing


def _trace_routers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[Tensor]]:
    """Return lists that a forward fills with the gaps (tokens,) and choices (tokens, experts)."""
    gaps: list[Tensor] = []
    choices: list[Tensor] = []
    select = Router.select

    def traced_select(router: Router, logits: Tensor, expert_bias: Tensor | None) -> Tensor:
        gaps.append(gap_at_the_cut(router, logits, expert_bias))
        expert_ids = select(router, logits, expert_bias)
        choices.append(_as_mask(expert_ids, logits))
        return expert_ids

    monkeypatch.setattr(Router, "select", traced_select)
    return gaps, choices


def _hf_choices(outputs: Any) -> Tensor:
    """Return the choices of a router of transformers: (tokens, experts) bool.

    Its outputs are (logits, weights, ids), or in Llama 4 (weights of all experts, logits).
    """
    if len(outputs) == 2:
        return outputs[0] > 0  # type: ignore[no-any-return]
    return _as_mask(outputs[2], outputs[0])


def _as_mask(expert_ids: Tensor, logits: Tensor) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, expert_ids, True)


def gap_at_the_cut(router: Router, logits: Tensor, expert_bias: Tensor | None) -> Tensor:
    """Return how much the best rejected score of each token must rise to be chosen."""
    scores = logits.softmax(-1) if router.score_func == "softmax" else logits.sigmoid()
    scores = scores if expert_bias is None else scores + expert_bias
    gap = torch.full(scores.shape[:1], torch.inf)
    if router.num_limited_groups < router.num_groups:
        by_group = scores.unflatten(-1, (router.num_groups, -1))
        best = by_group.topk(2 if router.score_func == "sigmoid" else 1, -1).values.sum(-1)
        ranked = best.topk(router.num_limited_groups + 1, -1)
        gap = ranked.values[:, -2] - ranked.values[:, -1]
        allowed = torch.zeros_like(best).scatter(-1, ranked.indices[:, :-1], 1.0).bool()
        scores = by_group.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    if router.top_k == scores.shape[1]:
        return gap
    ranked_scores = scores.topk(router.top_k + 1, -1).values
    return gap.minimum(ranked_scores[:, -2] - ranked_scores[:, -1])
