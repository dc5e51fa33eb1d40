// For LD_PRELOAD: one RDMA device that can do nothing, which is enough for an InfiniStore server that serves TCP.
#include <stdlib.h>
#include <string.h>
#include <infiniband/verbs.h>
#undef ibv_query_port
#undef ibv_reg_mr
static struct ibv_device dev = {.node_type=1,.name="fake0",.dev_name="fake0"};
static struct ibv_context ctx; static struct ibv_pd pd;
struct ibv_device **ibv_get_device_list(int *n){ struct ibv_device **l=calloc(2,sizeof *l); l[0]=&dev; if(n)*n=1; return l; }
void ibv_free_device_list(struct ibv_device **l){ free(l); }
const char *ibv_get_device_name(struct ibv_device *d){ return d->name; }
struct ibv_context *ibv_open_device(struct ibv_device *d){ ctx.device=d; ctx.abi_compat=NULL; return &ctx; }
int ibv_close_device(struct ibv_context *c){ return 0; }
int ibv_query_port(struct ibv_context *c, uint8_t p, struct _compat_ibv_port_attr *a){
  struct ibv_port_attr *q=(void*)a; q->link_layer=IBV_LINK_LAYER_INFINIBAND; q->lid=1; q->state=IBV_PORT_ACTIVE; q->active_mtu=IBV_MTU_4096; return 0; }
struct ibv_pd *ibv_alloc_pd(struct ibv_context *c){ pd.context=c; return &pd; }
int ibv_dealloc_pd(struct ibv_pd *p){ return 0; }
struct ibv_mr *ibv_reg_mr(struct ibv_pd *p, void *a, size_t l, int f){ struct ibv_mr *m=calloc(1,sizeof *m); m->addr=a; m->length=l; m->pd=p; m->lkey=m->rkey=1; return m; }
int ibv_dereg_mr(struct ibv_mr *m){ free(m); return 0; }
