#include "fake_fabric_info.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

namespace moe_p2p::test {

using namespace provider::libfabric;  // NOLINT(google-build-using-namespace): all of the ABI

namespace {

// An Info and all that it points to.
struct FullInfo : Info {
  TxAttr tx{};
  RxAttr rx{};
  EpAttr ep{};
  DomainAttr domain{};
  FabricAttr fabric{};

  FullInfo() : Info{} { link(); }
  explicit FullInfo(const Info& other) : Info(other) {
    tx = *other.tx_attr;
    rx = *other.rx_attr;
    ep = *other.ep_attr;
    domain = *other.domain_attr;
    fabric = *other.fabric_attr;
    link();
    next = nullptr;
    for (char** text : {&domain.name, &fabric.name, &fabric.prov_name})
      if (*text) *text = strdup(*text);
  }
  FullInfo(const FullInfo&) = delete;
  FullInfo& operator=(const FullInfo&) = delete;
  ~FullInfo() {
    for (char* text : {domain.name, fabric.name, fabric.prov_name}) std::free(text);
  }

 private:
  void link() {
    tx_attr = &tx;
    rx_attr = &rx;
    ep_attr = &ep;
    domain_attr = &domain;
    fabric_attr = &fabric;
  }
};

}  // namespace

Info* dup_efa_info(const Info* info) { return info ? new FullInfo(*info) : new FullInfo; }

void free_efa_info(Info* info) {
  while (info) delete static_cast<FullInfo*>(std::exchange(info, info->next));
}

Info* make_efa_infos(const Info& hints, size_t queue) {
  Info* first = nullptr;
  for (int i = 19; i >= 0; --i) {
    auto* info = new FullInfo(hints);
    info->fabric.name = strdup(i < 10 ? "efa-direct" : "efa");
    info->domain.name = strdup(("efa" + std::to_string(i % 10)).c_str());
    info->domain.mr_mode &= kMrLocal | kMrVirtAddr | kMrAllocated | kMrProvKey | kMrHmem;
    info->domain.cq_data_size = 4;
    info->domain.mr_key_size = 4;
    info->tx.size = queue;
    info->tx.rma_iov_limit = 1;
    info->ep.max_msg_size = size_t{1} << 30;
    info->next = first;
    first = info;
  }
  return first;
}

}  // namespace moe_p2p::test
