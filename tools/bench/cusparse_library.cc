// Finds cuSPARSE, without its headers.
#include <dlfcn.h>

#include <type_traits>

#include "card.h"
#include "core/text.h"
#include "cusparse.h"

namespace blocksparse::bench::cusparse {

namespace {

Result<Library> load() {
  const Result<void*> opened = open_library("BLOCKSPARSE_CUSPARSE", {"libcusparse.so.12", "libcusparse.so.11"});
  if (!opened.ok()) return opened.status();
  if (card_stream() == nullptr) return Status(StatusCode::unavailable, "cusparse: no card");
  const char* missing = nullptr;
  auto find = [&](auto& function, const char* name, bool needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(*opened, name));
    if (function == nullptr && needed) missing = name;
  };
  Library found;
  int (*create)(Handle*) = nullptr;
  int (*create_general)(Descriptor*) = nullptr;
  int (*set_stream)(Handle, void*) = nullptr;
  int (*get_version)(Handle, int*) = nullptr;
  find(create, "cusparseCreate");
  find(create_general, "cusparseCreateMatDescr");
  find(set_stream, "cusparseSetStream");
  find(get_version, "cusparseGetVersion");
  find(found.error_string, "cusparseGetErrorString");
  find(found.create_bsr, "cusparseCreateBsr", false);  // since CUDA 12.1
  find(found.create_ell, "cusparseCreateBlockedEll");
  find(found.create_dense, "cusparseCreateDnMat");
  find(found.destroy_sparse, "cusparseDestroySpMat");
  find(found.destroy_dense, "cusparseDestroyDnMat");
  find(found.buffer_size, "cusparseSpMM_bufferSize");
  find(found.multiply, "cusparseSpMM");
  find(found.bsrmm_f32, "cusparseSbsrmm", false);
  find(found.bsrmm_f64, "cusparseDbsrmm", false);
  if (missing != nullptr) return Status(StatusCode::unavailable, concat("libcusparse has no ", missing));
  int version = 0;
  if (create(&found.handle) != 0 || create_general(&found.general) != 0 ||
      set_stream(found.handle, card_stream()) != 0 || get_version(found.handle, &version) != 0) {
    return Status(StatusCode::unavailable, "cusparse: no handle could be made");
  }
  found.version = concat(version / 1000, ".", version / 100 % 10, ".", version % 100);
  return found;
}

}  // namespace

Result<const Library*> library() {
  static const Result<Library> loaded = load();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace blocksparse::bench::cusparse
