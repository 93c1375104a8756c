// The kernels that any machine runs: portable C++, with what the compiler's baseline makes of it. There is no portable
// streaming store, so both sets are the same.
#include "copy/elements.h"
#include "copy/kernels.h"

namespace shmsync {

namespace {

template <Kind kind>
void run(void* destination, const void* source, std::size_t nbytes) {
  elements<kind>(static_cast<char*>(destination), static_cast<const char*>(source), nbytes / traits(kind).source_item);
}

#define SHMSYNC_PLAIN                                                                                         \
  {run<Kind::bytes>, run<Kind::float32_to_bfloat16>, run<Kind::float32_to_float16>, run<Kind::bfloat16_to_float32>, \
   run<Kind::float16_to_float32>}

const Kernels kPlain = {"plain", SHMSYNC_PLAIN, SHMSYNC_PLAIN, [] {}};

#undef SHMSYNC_PLAIN

}  // namespace

const Kernels* plain_kernels() { return &kPlain; }

}  // namespace shmsync
