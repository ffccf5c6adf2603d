// The Python module gyre_megatron._C: importing it registers every operator of csrc/ under torch.ops.gyre.
#include <Python.h>

extern "C" PyObject* PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
