"""C31: one trainer on the GPU, a worker on the CPU and one on the GPU; leaves without dimensions among the weights.

Mutants: the host ring left out of a push once there is a device ring; views of the host ring given to a module on the
GPU; 0-dim leaves skipped in the gather; a look at the devices (`cudaGetDeviceCount`) when a subscriber is made.
"""

from __future__ import annotations

from tests.gpu import work
from tests.gpu.modules import Exploring, digest, randomise
from tests.gpu.steps import on_gpu


def test_each_worker_has_the_values_on_its_own_device(publisher, workers, on_host) -> None:
    source, [on_gpu_worker] = on_gpu(Exploring), workers(1)
    channel = publisher(source)
    channel.publish(randomise(source, 1))
    before = on_host.call(work.traces_of_a_device)
    on_host.call(work.attach, str(channel.handle), Exploring, "auto", "cpu")
    on_gpu_worker.call(work.attach, str(channel.handle), Exploring)
    for version in range(2, 6):
        channel.publish(randomise(source, version))
        expected = digest(source)
        for worker, device in ((on_host, "cpu"), (on_gpu_worker, "cuda:0")):
            assert worker.call(work.contents) == (version, "map", expected)
            assert worker.call(work.devices) == {device}
    assert channel.stats()["rings"] == 1
    assert not before[0]
    assert on_host.call(work.traces_of_a_device) == before, "the worker on the CPU has opened the GPU's driver"
