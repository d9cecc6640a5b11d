"""When a layer of a step is really in the cache of a CUDA device, where a call only queues work."""

from __future__ import annotations

import torch

from model.runner import LayerDone


class LayerEvents:
    """Calls `layer_done` for each layer once the device has stored its keys and values: who is told may read them.

    It waits for a layer when the next one has been queued, so that the device has work meanwhile.
    """

    def __init__(self, layer_done: LayerDone, device: torch.device) -> None:
        self._layer_done = layer_done
        self._device = device
        self._stored: tuple[int, torch.cuda.Event] | None = None

    def queued(self, layer: int) -> None:
        """The work that stores this layer has been queued on the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self.wait()
        self._stored = layer, event

    def wait(self) -> None:
        """Returns when the device has stored the last layer that was queued, and it has been told."""
        if self._stored is not None:
            (layer, event), self._stored = self._stored, None
            event.synchronize()
            self._layer_done(layer)
