// What decoding on a CPU spends its time on, for the few tokens of a round, as operators that a graph can hold.
#include "kernelsAttention.h"
#include "kernelsLinear.h"
#include "kernelsSampling.h"

TORCH_LIBRARY(native, library) {
    library.def("linear(Tensor x, Tensor packed, Tensor? bias, int width, bool gelu=False) -> Tensor");
    library.def("attend(Tensor query, Tensor keys, Tensor values, Tensor positions, Tensor(a!) kept_keys, "
                "Tensor(b!) kept_values, float scale) -> Tensor");
    library.def("stored(Tensor x) -> Tensor");
    library.def("probabilities(Tensor logits, Tensor settings) -> Tensor");
    library.def("pick(Tensor probs, Tensor u) -> Tensor");
    library.def("accept(Tensor p, Tensor q, Tensor drafts, Tensor u) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(native, CPU, library) {
    library.impl("linear", linear_packed);
    library.impl("attend", attend_slots);
    library.impl("stored", [](const at::Tensor& x) { return x.clone(); });
    library.impl("probabilities", probabilities);
    library.impl("pick", pick);
    library.impl("accept", accept);
}
