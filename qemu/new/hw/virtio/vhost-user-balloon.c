/*
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Vhost-user memory balloon
 *
 * The backend discards guest memory by itself, by punching holes into the
 * files behind it. What is left to do here is to see that this can work.
 */

#include "qemu/osdep.h"
#include "qapi/error.h"
#include "exec/cpu-common.h"
#include "exec/memory.h"
#include "hw/boards.h"
#include "hw/qdev-properties.h"
#include "hw/virtio/virtio-bus.h"
#include "hw/virtio/vhost-user-balloon.h"
#include "standard-headers/linux/virtio_balloon.h"
#include "standard-headers/linux/virtio_ids.h"
#include "system/hostmem.h"

static const VMStateDescription vu_balloon_vmstate = {
    .name = "vhost-user-balloon",
    .unmigratable = 1,
};

static const Property vu_balloon_properties[] = {
    DEFINE_PROP_CHR("chardev", VHostUserBase, chardev),
};

/*
 * The backend takes pages out of the file. If our mapping of it is private,
 * the guest keeps its copies of them: nothing comes back, and what the
 * backend believes to be zero is not.
 */
static int vu_balloon_check_shared(Object *obj, void *opaque)
{
    Error **errp = opaque;
    HostMemoryBackend *backend;

    backend = (HostMemoryBackend *)object_dynamic_cast(obj,
                                                       TYPE_MEMORY_BACKEND);
    if (!backend || !host_memory_backend_is_mapped(backend)) {
        return 0;
    }
    if (!memory_region_is_ram(host_memory_backend_get_memory(backend)) ||
        !qemu_ram_is_shared(host_memory_backend_get_memory(backend)->ram_block)
        || memory_region_get_fd(host_memory_backend_get_memory(backend)) < 0) {
        error_setg(errp, "vhost-user-balloon: the guest's memory (%s) is not "
                   "a shared file", object_get_canonical_path_component(obj));
        error_append_hint(errp, "Use a memory-backend-memfd, or a "
                          "memory-backend-file with share=on.\n");
        return 1;
    }
    return 0;
}

static void vu_balloon_realize(DeviceState *dev, Error **errp)
{
    VHostUserBase *vub = VHOST_USER_BASE(dev);
    VHostUserBaseClass *vubs = VHOST_USER_BASE_GET_CLASS(dev);
    MachineState *machine = MACHINE(qdev_get_machine());
    Error *local_err = NULL;

    if (object_child_foreach_recursive(OBJECT(machine),
                                       vu_balloon_check_shared, errp) ||
        object_child_foreach_recursive(object_get_objects_root(),
                                       vu_balloon_check_shared, errp)) {
        return;
    }

    /* Pages that are pinned, by VFIO for example, must stay where they are. */
    if (ram_block_discard_require(true)) {
        error_setg(errp, "vhost-user-balloon: discarding RAM is disabled, "
                   "by a device that pins it or by another reason");
        return;
    }

    vub->virtio_id = VIRTIO_ID_BALLOON;
    /* How many of them are used depends on the features. */
    vub->num_vqs = 5;
    vub->vq_size = 128;
    vub->config_size = sizeof(struct virtio_balloon_config);

    vubs->parent_realize(dev, &local_err);
    if (local_err) {
        ram_block_discard_require(false);
        error_propagate(errp, local_err);
    }
}

static void vu_balloon_unrealize(DeviceState *dev)
{
    VHostUserBaseClass *vubs = VHOST_USER_BASE_GET_CLASS(dev);

    vubs->parent_unrealize(dev);
    ram_block_discard_require(false);
}

/* The backend has state of the driver: what is in the balloon. */
static struct vhost_dev *vu_balloon_get_vhost(VirtIODevice *vdev)
{
    return &VHOST_USER_BASE(vdev)->vhost_dev;
}

static void vu_balloon_reset(VirtIODevice *vdev)
{
    /* What the last driver wrote is not for the next backend. */
    VHOST_USER_BASE(vdev)->config_written = false;
}

static void vu_balloon_class_init(ObjectClass *klass, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(klass);
    VHostUserBaseClass *vubc = VHOST_USER_BASE_CLASS(klass);
    VirtioDeviceClass *vdc = VIRTIO_DEVICE_CLASS(klass);

    dc->vmsd = &vu_balloon_vmstate;
    device_class_set_props(dc, vu_balloon_properties);
    device_class_set_parent_realize(dc, vu_balloon_realize,
                                    &vubc->parent_realize);
    device_class_set_parent_unrealize(dc, vu_balloon_unrealize,
                                      &vubc->parent_unrealize);
    vdc->get_vhost = vu_balloon_get_vhost;
    vdc->reset = vu_balloon_reset;
    set_bit(DEVICE_CATEGORY_MISC, dc->categories);
}

static const TypeInfo vu_balloon_info = {
    .name = TYPE_VHOST_USER_BALLOON,
    .parent = TYPE_VHOST_USER_BASE,
    .instance_size = sizeof(VHostUserBalloon),
    .class_init = vu_balloon_class_init,
};

static void vu_balloon_register_types(void)
{
    type_register_static(&vu_balloon_info);
}

type_init(vu_balloon_register_types)
