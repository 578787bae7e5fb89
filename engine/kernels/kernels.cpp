// The operators on which decoding on a CPU spends its time, for the few tokens of a round. A graph can contain them.
#include "linear.h"
#include "sampling.h"
#include "trees.h"

#include <torch/csrc/inductor/aoti_torch/utils.h>

// attention.cpp
at::Tensor attend_slots(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& positions, const at::Tensor& kept_keys, const at::Tensor& kept_values,
                        double scale);
at::Tensor attend_nodes(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& slots, const at::Tensor& root, const at::Tensor& ancestors,
                        const at::Tensor& kept_keys, const at::Tensor& kept_values, double scale);
void move_slots(const at::TensorList& all, const at::Tensor& source, const at::Tensor& slots);

// The same operators as C functions, which graphs call without going through Python. loader.py reads the declarations.
#define TENSOR(handle) (*torch::aot_inductor::tensor_handle_to_tensor_pointer(handle))
#define GIVE(...) \
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({ *result = torch::aot_inductor::new_tensor_handle(__VA_ARGS__); })
extern "C" {
AOTITorchError aoti_torch_cpu_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t width,
                                     int32_t gelu, AtenTensorHandle* result) {
    GIVE(linear_packed(TENSOR(x), TENSOR(packed), bias ? std::optional(TENSOR(*bias)) : std::nullopt, width, gelu));
}
AOTITorchError aoti_torch_cpu_attend(AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values,
                                     AtenTensorHandle positions, AtenTensorHandle kept_keys,
                                     AtenTensorHandle kept_values, double scale, AtenTensorHandle* result) {
    GIVE(attend_slots(TENSOR(query), TENSOR(keys), TENSOR(values), TENSOR(positions), TENSOR(kept_keys),
                      TENSOR(kept_values), scale));
}
AOTITorchError aoti_torch_cpu_attend_tree(AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values,
                                          AtenTensorHandle slots, AtenTensorHandle root, AtenTensorHandle ancestors,
                                          AtenTensorHandle kept_keys, AtenTensorHandle kept_values, double scale,
                                          AtenTensorHandle* result) {
    GIVE(attend_nodes(TENSOR(query), TENSOR(keys), TENSOR(values), TENSOR(slots), TENSOR(root), TENSOR(ancestors),
                      TENSOR(kept_keys), TENSOR(kept_values), scale));
}
AOTITorchError aoti_torch_cpu_stored(AtenTensorHandle x, AtenTensorHandle* result) { GIVE(TENSOR(x).clone()); }
AOTITorchError aoti_torch_cpu_probabilities(AtenTensorHandle logits, AtenTensorHandle settings,
                                            AtenTensorHandle* result) {
    GIVE(probabilities(TENSOR(logits), TENSOR(settings)));
}
AOTITorchError aoti_torch_cpu_pick(AtenTensorHandle probs, AtenTensorHandle u, AtenTensorHandle* result) {
    GIVE(pick(TENSOR(probs), TENSOR(u)));
}
AOTITorchError aoti_torch_cpu_siblings(AtenTensorHandle q, AtenTensorHandle u, const int64_t* counts, int64_t nodes,
                                       AtenTensorHandle* tokens, AtenTensorHandle* laws) {
    AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
        auto [drawn, from] = siblings(TENSOR(q), TENSOR(u), at::IntArrayRef(counts, nodes));
        *tokens = torch::aot_inductor::new_tensor_handle(std::move(drawn));
        *laws = torch::aot_inductor::new_tensor_handle(std::move(from));
    });
}
}

TORCH_LIBRARY(native, library) {
    library.def("linear(Tensor x, Tensor packed, Tensor? bias, int width, bool gelu=False) -> Tensor");
    library.def("attend(Tensor query, Tensor keys, Tensor values, Tensor positions, Tensor(a!) kept_keys, "
                "Tensor(b!) kept_values, float scale) -> Tensor");
    library.def("attend_tree(Tensor query, Tensor keys, Tensor values, Tensor slots, Tensor root, Tensor ancestors, "
                "Tensor(a!) kept_keys, Tensor(b!) kept_values, float scale) -> Tensor");
    library.def("move(Tensor(a!)[] kept, Tensor source, Tensor slots) -> ()");
    library.def("stored(Tensor x) -> Tensor");
    library.def("probabilities(Tensor logits, Tensor settings) -> Tensor");
    library.def("pick(Tensor probs, Tensor u) -> Tensor");
    library.def("siblings(Tensor q, Tensor u, int[] counts) -> (Tensor, Tensor)");
    library.def("accept(Tensor p, Tensor q, Tensor drafts, Tensor u) -> (Tensor, Tensor)");
    library.def("accept_block(Tensor p, Tensor q, Tensor drafts, Tensor u) -> (Tensor, Tensor)");
    library.def("accept_tree(Tensor p, Tensor q, Tensor drafts, Tensor u, int[] parents, int depth, bool traversal) -> "
                "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(native, CPU, library) {
    library.impl("linear", linear_packed);
    library.impl("attend", attend_slots);
    library.impl("attend_tree", attend_nodes);
    library.impl("move", [](at::TensorList all, const at::Tensor& source, const at::Tensor& slots) {
        move_slots(all, source, slots);
    });
    library.impl("stored", [](const at::Tensor& x) { return x.clone(); });
    library.impl("probabilities", probabilities);
    library.impl("pick", pick);
    library.impl("siblings", siblings);
    library.impl("accept", accept);
    library.impl("accept_block", accept_block);
    library.impl("accept_tree", accept_tree);
}
