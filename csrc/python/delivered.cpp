// The autograd node between a parameter and its local shard, and the check of tensors that native code reads.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <type_traits>

#include "python/internal.h"

namespace rtp {
namespace {

// Passes the gradient of a local shard to `deliver(node, gradient)`, which returns that of the parameter; None: none.
class DeliveredGradient : public torch::autograd::Node {
 public:
  DeliveredGradient(py::object deliver, std::optional<int64_t> sequence, torch::autograd::edge_list edges)
      : Node(number(sequence), std::move(edges)), deliver_(std::move(deliver)) {}
  DeliveredGradient(const DeliveredGradient&) = delete;
  DeliveredGradient& operator=(const DeliveredGradient&) = delete;
  ~DeliveredGradient() override { release(); }

  std::string name() const override { return "DeliveredGradient"; }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const py::gil_scoped_acquire gil;
    const auto self = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(getptr()));
    if (!self) throw python_error();
    const py::object gradient = gradients[0].defined() ? py::cast(gradients[0]) : py::none();
    const py::object result = deliver_(self, gradient);
    return {result.is_none() ? at::Tensor() : result.cast<at::Tensor>()};
  }

 private:
  // Takes the next number even where another one is given: autograd runs nodes of equal numbers in any order.
  static uint64_t number(std::optional<int64_t> given) {
    const uint64_t next = at::sequence_number::get_and_increment();
    return given ? static_cast<uint64_t>(*given) : next;
  }

  void release() {
    if (!Py_IsInitialized()) {
      deliver_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    deliver_ = py::object();
  }

  py::object deliver_;
};

// Nodes are held by std::shared_ptr before torch 2.14.
using NodePointer = decltype(std::declval<torch::autograd::Node&>().getptr());

template <typename Pointer, typename... Arguments>
Pointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<DeliveredGradient>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<DeliveredGradient>(std::forward<Arguments>(arguments)...);
  }
}

// Whether all tensors among objects, and in lists and tuples among them, are memory that native code can read: none has
// a class with rules of its own.
bool are_memory(PyObject* objects) {
  const auto check = [](PyObject* object) {
    if (THPVariable_Check(object)) return !THPVariable_Unpack(object).key_set().has(c10::DispatchKey::Python);
    return (!PyTuple_Check(object) && !PyList_Check(object)) || are_memory(object);
  };
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(objects);
  PyObject** each = PySequence_Fast_ITEMS(objects);
  return std::all_of(each, each + count, check);
}

// Whether hooks of the node that accumulates the gradients of a leaf read them; hooks of the leaf itself do not count.
bool has_node_hooks(const at::Tensor& leaf) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return node && !(node->pre_hooks().empty() && node->post_hooks().empty());
}

// Whether the running backward executes the node of a leaf, which adds to its .grad; false where torch.autograd.grad
// captures the gradient instead, and for all other objects.
bool accumulates(const py::object& object) {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || !torch::autograd::THPCppFunction_Check(object.ptr())) return false;
  auto* node = reinterpret_cast<torch::autograd::THPCppFunction*>(object.ptr())->cdata.get();
  if (torch::autograd::get_current_graph_task_nodes_in_graph()->count(node) == 0) return false;
  if (executed->empty()) return true;  // a backward without `inputs`
  const auto found = executed->find(node);
  return found != executed->end() && found->second.needed_ && !found->second.captures_;
}

bool read_within(const py::object& ctx, const py::object& parameter) {
  for (const char* hooks : {"_backward_hooks", "_post_accumulate_grad_hooks"}) {
    if (py::bool_(parameter.attr(hooks))) return true;
  }
  if (has_node_hooks(parameter.cast<at::Tensor>())) return true;
  if (py::bool_(py::getattr(ctx, "create_graph", py::bool_(false)))) return true;
  return !accumulates(py::object(ctx.attr("next_functions"))[py::int_(0)][py::int_(0)]);
}

}  // namespace

void bind_delivered(py::module_& m) {
  m.def("read_within", &read_within, py::arg("ctx"), py::arg("parameter"),
        "Returns whether the gradient of a parameter has a reader within the running backward: torch.autograd.grad, a "
        "graph of this backward, or a hook, of the parameter or of its node.");
  m.def("accumulates", &accumulates, py::arg("node"),
        "Returns whether the running backward accumulates into the .grad of the leaf that a node belongs to; False "
        "where torch.autograd.grad returns the gradient instead.");
  m.def("are_memory", [](const py::tuple& objects) { return are_memory(objects.ptr()); }, py::arg("objects"));
  m.def(
      "delivered",
      [](const at::Tensor& parameter, const at::Tensor& local, py::object deliver, std::optional<int64_t> sequence) {
        at::Tensor shard = local.detach();  // not a view: autograd refuses to unpack one after a write
        const auto node =
            make_node<NodePointer>(std::move(deliver), sequence, torch::autograd::collect_next_edges(parameter));
        torch::autograd::set_history(shard, node);
        return shard;
      },
      py::arg("parameter"), py::arg("local"), py::arg("deliver"), py::arg("sequence") = std::nullopt,
      "Returns the local shard of a parameter, with a node that passes its gradient to deliver(node, gradient).");
}

}  // namespace rtp
