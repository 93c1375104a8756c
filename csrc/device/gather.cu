// The gather kernel. Compiled apart from the extension, where there is an nvcc, to shmsync/_gather.fatbin.
#include "device/gather.h"

using shmsync::cuda::GatherRow;

extern "C" __global__ void __launch_bounds__(shmsync::cuda::kGatherThreads)
    SHMSYNC_GATHER_KERNEL(const GatherRow* rows, unsigned count, char* base) {
  shmsync::cuda::gather(rows, count, base, blockIdx.x, threadIdx.x);
}
