"""ExpertKernel: one way of holding experts resident and of computing an item with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ffn_faas import env
from ffn_faas.errors import ResourceError
from ffn_faas.experts.layouts import DOWN, GATE, UP

if TYPE_CHECKING:
    import torch

    from ffn_faas.experts.dummy import DummyWeights
    from ffn_faas.experts.spec import MoESpec

__all__ = ["DOWN", "GATE", "UP", "ExpertKernel", "LayerKernel", "empty"]


class ExpertKernel(ABC):
    """prepare -> allocate -> per layer, in order: matrices filled, finish_layer -> finish -> compute ...

    One thread calls all of these but ``matrix_buffer`` and ``finish_matrix``, which the loader's threads call;
    ``compute`` may use threads of its own.
    """

    name: str
    on_host = True
    """Whether the resident weights take this host's memory, which is then asked for before any is taken."""

    def __init__(self, spec: MoESpec) -> None:
        self.spec = spec
        self.num_local_experts = 0

    @property
    def description(self) -> str:
        """For the log, once loaded: the name, and what it runs on where it has a choice."""
        return self.name

    def prepare(self) -> None:
        """Check, without weight memory, that this machine and model can be served.

        Raises ModelRefused for a shape the kernel cannot do, ResourceError when a library is missing.
        """
        return

    def allocate(self, experts: range) -> None:
        """Take the memory of ``experts`` (global ids, the same on every layer). Raises ResourceError, ModelRefused."""
        self.num_local_experts = len(experts)

    @abstractmethod
    def matrix_buffer(self, layer: int, expert: int, matrix: int) -> torch.Tensor:
        """Where the calling thread writes a matrix of a local expert: GATE and UP [I, H], DOWN [H, I].

        The biases, where ``spec.has_bias``: GATE_BIAS and UP_BIAS [I], DOWN_BIAS [H].
        Contiguous, in the spec's dtype, owned by the kernel, valid until the thread's ``finish_matrix`` for it.
        """

    def matrix_address(self, layer: int, expert: int, matrix: int) -> int:
        """Where ``matrix_buffer`` begins: for whoever copies bytes. A kernel that can tells it without torch."""
        address: int = self.matrix_buffer(layer, expert, matrix).data_ptr()
        return address

    def finish_matrix(self, layer: int, expert: int, matrix: int) -> None:  # noqa: ARG002
        """What ``matrix_buffer`` or ``matrix_address`` gave this thread is filled."""
        return

    def fill_dummy(self, layer: int, expert: int, local: int, matrix: int, dummy: DummyWeights) -> None:
        """Fill a matrix of global ``expert``, here ``local``, with what ``dummy`` has for it."""
        dummy.write(self.matrix_address(layer, local, matrix), layer, expert, matrix)
        self.finish_matrix(layer, local, matrix)

    def finish_layer(self, layer: int) -> None:  # noqa: ARG002
        """All matrices of ``layer`` are finished."""
        return

    def finish(self) -> None:
        """All layers are filled: free what only loading needed."""
        return

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of weights that stay in memory after ``finish``."""

    @abstractmethod
    def compute(
        self,
        layer: int,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """``out[t] = sum_k weights[t, k] * expert[expert_ids[t, k]](hidden[t])``.

        ``hidden`` [T, H] in the spec's dtype, ``expert_ids`` [T, K] i32 local ids, checked to be below E_local; a
        negative id is no expert and its weight is not read. ``weights`` [T, K] f32. ``out`` [T, H] f32: every row
        is written, rows without an expert with zeros. All contiguous, on the CPU, owned by the caller; T may be 0.
        A NaN in a row stays in its row.
        """

    def warm_up(self) -> None:
        """Compute one row with each layer's first expert, so that the first post finds threads started."""
        import torch

        hidden = torch.zeros(1, self.spec.hidden_size, dtype=getattr(torch, self.spec.dtype))
        expert_ids = torch.full((1, self.spec.top_k), -1, dtype=torch.int32)
        expert_ids[0, 0] = 0
        out = torch.empty(1, self.spec.hidden_size)
        for layer in range(self.spec.num_layers):
            self.compute(layer, hidden, expert_ids, torch.ones(1, self.spec.top_k), out)

    def release(self) -> None:
        """Drop the weights. Idempotent; ``compute`` is not called afterwards."""
        return


class LayerKernel(ExpertKernel):
    """A kernel that is filled a layer at a time, matrices side by side as torch has them, and uses torch's threads."""

    def prepare(self) -> None:
        import torch

        torch.set_num_threads(env.num_threads())

    @abstractmethod
    def layer_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer to be filled: w13 [E_local, 2I, H] (gate rows, then up rows) and w2 [E_local, H, I].

        Contiguous, in the spec's dtype, owned by the kernel, valid until ``finish_layer(layer)``. Any thread.
        """

    def layer_biases(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``layer_buffers``: b13 [E_local, 2I] (of gate, then of up) and b2 [E_local, H]."""
        raise NotImplementedError(f"kernel {self.name} holds no biases of layer {layer}")

    def matrix_buffer(self, layer: int, expert: int, matrix: int) -> torch.Tensor:
        wide, narrow = self.layer_buffers(layer) if matrix <= DOWN else self.layer_biases(layer)
        inter = self.spec.intermediate_size
        return (wide[expert, :inter], wide[expert, inter:], narrow[expert])[matrix % len((GATE, UP, DOWN))]


def empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """An uninitialised CPU tensor. Raises ResourceError when the memory cannot be had."""
    import torch

    try:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    except (RuntimeError, MemoryError) as error:
        raise ResourceError(
            f"cannot allocate {dtype} {list(shape)} for experts: {error}", remedy="use more F ranks or a larger host"
        ) from error
