"""Synchronize weights that several stages share, by a sum of their gradients once per step.

A common case is the embedding of the first stage that is also the head of the last one. Each rank
that uses a shared weight has a copy. Every rank computes the same sum, in the order of the stages,
so equal updates keep the copies equal. Norms count only the first stage's copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..base.mesh import Mesh
from ..comm.collectives import Comm, ordered_sum
from .messages import groups_along_pp
from .schedule import Numbers

TILE_NUMEL = 1 << 16  # elements of the fp32 scratch buffer of a sum


class Ties:
    """Synchronizes tied weights, which pipeline stages on several ranks share.

    `spread` copies their initial values between the ranks. `add_up` sums their gradients in each
    step, so that the copies of a weight stay equal.

    Args:
        world: The communicator of all ranks.
        mesh: The mesh, which defines the ranks of each pipeline.
        placement: The rank along "pp" of each stage.
        stages: For each tied weight, the numbers of the stages that use it, in ascending order.

    Raises:
        PeerError: Another rank failed or issued a different collective.

    Note:
        Collective: every rank of `world` must construct it.
    """

    def __init__(
        self,
        world: Comm,
        mesh: Mesh,
        placement: Sequence[int],
        stages: Mapping[str, Numbers],
    ) -> None:
        """Create the communicator of the ranks that share a weight."""
        # Ranks in the order of their first stages
        self.ranks = {
            name: tuple(dict.fromkeys(placement[stage] for stage in found))
            for name, found in stages.items()
        }
        self.ranks = {name: ranks for name, ranks in sorted(self.ranks.items()) if len(ranks) > 1}
        self.rank = mesh.coordinates["pp"]
        sharing = sorted({rank for ranks in self.ranks.values() for rank in ranks})
        self._index = {rank: place for place, rank in enumerate(sharing)}
        self.comm: Comm | None = None
        if sharing:
            found = world.split(groups_along_pp(mesh, [sharing]), "pp ties", is_new=True)
            self.comm = found if self.rank in sharing else None

    @property
    def is_sharing(self) -> bool:
        """Return whether this rank shares a tied weight with another pipeline rank."""
        return self.comm is not None

    def is_counted(self, name: str) -> bool:
        """Return whether norms and checkpoints include this rank's copy of a weight.

        Of the pipeline ranks that share a tied weight, only the rank with the first stage that uses
        it returns True. For a weight that only one pipeline rank uses, the result is True.

        Args:
            name: The name of the weight in the whole model.
        """
        return name not in self.ranks or self.ranks[name][0] == self.rank

    def spread(self, values: Mapping[str, Tensor]) -> None:
        """Copy the initial values of each shared weight to all ranks that use it.

        The values are those of the first stage that uses the weight. The call has no effect on a
        rank that shares no weight.

        Args:
            values: All shared weights of this rank, contiguous, by name. They are overwritten on
                all ranks except the rank of the first stage that uses the weight.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank that shares a weight must call it.
        """
        if self.comm is None:
            return
        for name in self.ranks:
            first, *others = self._places(name)
            own = values[name].view(-1) if self._shares(name) else self._nothing()
            to = others if self.comm.rank == first else []
            sent = own.to(self.comm.device)  # NCCL sends nothing from the host
            inbox = {first: sent} if self.comm.rank in others else {}
            self._exchange(sent, to, inbox, "gather", f"values of {name}")
            if inbox and sent is not own:
                own.copy_(sent)

    def add_up(self, grads: Mapping[str, Tensor]) -> None:
        """All-reduce the gradients of shared weights in place.

        The ranks that use a weight sum its gradients. The sum is formed in fp32 in the order of the
        stages, so it is equal on these ranks. The call has no effect on a rank that shares no
        weight.

        Args:
            grads: This rank's contiguous gradients of shared weights, by name. If a weight has no
                gradient, it must be omitted on all ranks.

        Raises:
            PeerError: Another rank failed or issued a different collective.

        Note:
            Collective: every rank that shares a weight must call it.
        """
        comm = self.comm
        if comm is None:
            return
        for name in self.ranks:
            if not self._shares(name) or name not in grads:
                self._exchange(self._nothing(), [], {}, "reduce", f"tied {name}")
                continue
            places = self._places(name)
            own = grads[name].view(-1)
            to_send = comm.empty(own.numel(), own.dtype).copy_(own)
            inbox = {place: torch.empty_like(own) for place in places}
            self._exchange(to_send, places, inbox, "reduce", f"tied {name}")
            inbox[comm.rank] = to_send
            tile = min(own.numel(), TILE_NUMEL)
            scratch = torch.empty(tile, dtype=torch.float32, device=own.device)
            ordered_sum([inbox[place] for place in places], own, scratch, threads=comm.threads)

    def _shares(self, name: str) -> bool:
        return self.rank in self.ranks[name]

    def _places(self, name: str) -> list[int]:
        """Return the ranks of the communicator that share a weight, in the order of the stages."""
        return [self._index[rank] for rank in self.ranks[name]]

    def _nothing(self) -> Tensor:
        assert self.comm is not None
        return torch.empty(0, device=self.comm.device)

    def _exchange(
        self, own: Tensor, to: Sequence[int], inbox: Mapping[int, Tensor], lane: str, what: str
    ) -> None:
        """Send a tensor to some ranks of the communicator, and receive from those in `inbox`."""
        comm = self.comm
        assert comm is not None
        nothing = own[:0]
        pieces = [own if place in to else nothing for place in range(comm.size)]
        boxes = [inbox.get(place, nothing) for place in range(comm.size)]
        comm.exchange(pieces, boxes, lane, what, kind="tie").wait()
