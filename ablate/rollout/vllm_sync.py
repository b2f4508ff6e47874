"""The trainer's policy in the engine: LoRA adapters from memory, trained weights in place, and the check of both.

An adapter is registered once through vLLM's own classes, under an id that is then never looked up on disk; each later
step copies the tensors straight into the stacks that vLLM's kernels read. The first copy is compared bit for bit with
what vLLM's registration left there; where they differ (a layout this module does not know), every step registers anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ADAPTER_ID = 1
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's max_lora_rank may be


def max_rank(rank: int) -> int:
    """The smallest max_lora_rank that holds an adapter of a rank. Raises ValueError above 512."""
    fitting = [r for r in RANKS if r >= rank]
    if not fitting:
        raise ValueError(f"peft.r={rank}: vLLM takes LoRA ranks up to {RANKS[-1]}; say rollout=transformers")
    return fitting[0]


@dataclass
class Adapted:
    """One module with an adapter: its name in the base model, A (r, in), B (out, r) and the factor of B A."""

    name: str
    a: Tensor
    b: Tensor
    scaling: float


def adapter_of(model: Any, adapter: str = "default") -> list[Adapted]:
    """The LoRA modules of a PEFT model. Raises ValueError for what vLLM would drop or refuse: DoRA, bias,
    modules_to_save, adapted embeddings."""
    config = model.peft_config[adapter]
    refused = {
        "use_dora": getattr(config, "use_dora", False),
        "bias": getattr(config, "bias", "none") != "none",
        "lora_bias": getattr(config, "lora_bias", False),
        "modules_to_save": bool(getattr(config, "modules_to_save", None)),
    }
    for option, is_set in refused.items():
        if is_set:
            raise ValueError(f"peft.{option}: vLLM does not apply it; leave it out, or say rollout=transformers")
    found = []
    for name, module in model.get_base_model().named_modules():
        if getattr(module, "lora_embedding_A", None):
            raise ValueError(f"peft.target_modules names the embedding {name}: vLLM does not adapt it")
        if adapter in getattr(module, "lora_A", {}):
            found.append(
                Adapted(
                    name,
                    module.lora_A[adapter].weight.detach(),
                    module.lora_B[adapter].weight.detach(),
                    module.scaling[adapter],
                )
            )
    if not found:
        raise ValueError(f"the model has no LoRA module of adapter {adapter!r}")
    return found


class AdapterSync:
    """Keeps adapter ADAPTER_ID of an engine equal to a PEFT model's."""

    def __init__(self, worker: Any) -> None:
        self.worker_manager = worker.model_runner.lora_manager
        self.manager = self.worker_manager._adapter_manager
        self._targets: list[tuple[Tensor, Tensor]] | None = None
        self._signature: tuple[Any, ...] = ()
        self.direct = False

    def push(self, model: Any) -> None:
        """Makes the next request under ADAPTER_ID use the model's adapter as it is now."""
        adapted = adapter_of(model)
        signature = tuple((m.name, tuple(m.a.shape), tuple(m.b.shape)) for m in adapted)
        if self._targets is None or signature != self._signature or not self.direct:
            names = self._register(adapted)
            self._signature, self._targets = signature, self._find(names, adapted)
            self.direct = self._targets is not None and self._holds(adapted)
        else:
            self._copy(adapted)

    def _scaled(self, adapted: list[Adapted]) -> list[Tensor]:
        return list(torch._foreach_mul([m.b for m in adapted], [m.scaling for m in adapted]))

    def _copy(self, adapted: list[Adapted]) -> None:
        assert self._targets is not None
        with torch.no_grad():
            torch._foreach_copy_([a for a, _ in self._targets], [m.a for m in adapted])
            torch._foreach_copy_([b for _, b in self._targets], self._scaled(adapted))

    def _holds(self, adapted: list[Adapted]) -> bool:
        """Whether the engine's stacks hold the adapter, bit for bit."""
        assert self._targets is not None
        pairs = zip(self._targets, adapted, self._scaled(adapted), strict=True)
        return all(torch.equal(a, m.a.to(a)) and torch.equal(b, scaled.to(b)) for (a, b), m, scaled in pairs)

    def _register(self, adapted: list[Adapted]) -> list[str]:
        """Registers the adapter through vLLM and returns the modules' names there, in order."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        rank = max(len(m.a) for m in adapted)
        # Each module's own scaling goes into B: rank_pattern and alpha_pattern would be ignored.
        helper = PEFTHelper.from_dict(
            {"r": rank, "lora_alpha": rank, "target_modules": sorted({m.name for m in adapted})}
        )
        helper.validate_legal(self.worker_manager.lora_config)
        tensors: dict[str, Tensor] = {}
        for m, scaled in zip(adapted, self._scaled(adapted), strict=True):
            tensors[f"base_model.model.{m.name}.lora_A.weight"] = m.a.clone()  # vLLM writes into what it is given
            tensors[f"base_model.model.{m.name}.lora_B.weight"] = scaled
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        if mapper is not None and hasattr(mapper, "get_rename_mapper"):  # vLLM 0.31; 0.24 takes the mapper itself
            mapper = mapper.get_rename_mapper()
        lora = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            helper,
            device=str(adapted[0].a.device),
            dtype=self.worker_manager.lora_config.lora_dtype,
            model_vocab_size=self.worker_manager.vocab_size,
            weights_mapper=mapper,
            skip_prefixes=getattr(self.manager.model, "lora_skip_prefixes", None),
        )
        names = list(lora.loras)
        known = set(self.manager.modules) | {c for parts in self.manager.packed_modules.values() for c in parts}
        dropped = [name for name in names if name not in known]
        if dropped or len(names) != len(adapted):
            raise ValueError(
                f"vLLM would drop the adapters of {len(dropped) or 'some'} modules, among them "
                f"{', '.join(dropped[:3])}: take them out of peft.target_modules, or say rollout=transformers"
            )
        self.manager.remove_adapter(ADAPTER_ID)
        self.manager.add_adapter(lora)
        self.manager.activate_adapter(ADAPTER_ID)
        self.manager._last_mapping = None
        return names

    def _find(self, names: list[str], adapted: list[Adapted]) -> list[tuple[Tensor, Tensor]] | None:
        """The parts of vLLM's stacks that belong to each module; None where the layout is another one."""
        parents = {
            child: (parent, index)
            for parent, children in self.manager.packed_modules.items()
            for index, child in enumerate(children)
        }
        slot = self.manager.lora_index_to_id.index(ADAPTER_ID)
        targets = []
        for name, m in zip(names, adapted, strict=True):
            parent, index = (name, 0) if name in self.manager.modules else parents[name]
            module = self.manager.modules[parent]
            stacks_a, stacks_b = getattr(module, "lora_a_stacked", ()), getattr(module, "lora_b_stacked", ())
            if index >= len(stacks_a) or stacks_a[index].dim() != 4:
                return None
            a = stacks_a[index][slot, 0, : m.a.shape[0], : m.a.shape[1]]
            b = stacks_b[index][slot, 0, : m.b.shape[0], : m.b.shape[1]]
            if a.shape != m.a.shape or b.shape != m.b.shape:
                return None
            targets.append((a, b))
        return targets


def push_weights(engine_model: Any, model: Any) -> None:
    """Copies every parameter of a transformers model into the engine's, in place, cast to the engine's dtype.

    Raises ValueError where the engine keeps its weights in another layout than it loaded them in.
    """
    packed = [n for n, p in engine_model.named_parameters() if p.numel() == 0]
    if packed:
        raise ValueError(f"vLLM has repacked {packed[0]} after loading: full fine-tuning cannot be synced into it")
    with torch.no_grad():
        engine_model.load_weights((name, p.detach()) for name, p in model.named_parameters())


def fingerprint(model: Any) -> int:
    """Sum of the bits of all parameters, as integers: any change of the base weights shows."""
    total = 0
    for p in model.parameters():
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
        flat = p.detach().contiguous().reshape(-1).view(kind)
        total += sum(int(part.sum(dtype=torch.int64)) for part in flat.split(1 << 28))
    return total
