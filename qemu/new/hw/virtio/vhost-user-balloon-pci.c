/*
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Vhost-user memory balloon on PCI
 */

#include "qemu/osdep.h"
#include "hw/qdev-properties.h"
#include "hw/virtio/vhost-user-balloon.h"
#include "hw/virtio/virtio-pci.h"

#define TYPE_VHOST_USER_BALLOON_PCI "vhost-user-balloon-pci-base"
OBJECT_DECLARE_SIMPLE_TYPE(VHostUserBalloonPCI, VHOST_USER_BALLOON_PCI)

struct VHostUserBalloonPCI {
    VirtIOPCIProxy parent_obj;
    VHostUserBalloon vdev;
};

static void vhost_user_balloon_pci_realize(VirtIOPCIProxy *vpci_dev,
                                           Error **errp)
{
    VHostUserBalloonPCI *dev = VHOST_USER_BALLOON_PCI(vpci_dev);

    /* None of the queues is in a hurry: one vector for them, one for config. */
    vpci_dev->nvectors = 2;
    qdev_realize(DEVICE(&dev->vdev), BUS(&vpci_dev->bus), errp);
}

static void vhost_user_balloon_pci_class_init(ObjectClass *klass, void *data)
{
    DeviceClass *dc = DEVICE_CLASS(klass);
    VirtioPCIClass *k = VIRTIO_PCI_CLASS(klass);
    PCIDeviceClass *pcidev_k = PCI_DEVICE_CLASS(klass);

    k->realize = vhost_user_balloon_pci_realize;
    set_bit(DEVICE_CATEGORY_MISC, dc->categories);
    pcidev_k->vendor_id = PCI_VENDOR_ID_REDHAT_QUMRANET;
    pcidev_k->device_id = 0; /* set by virtio-pci, from the virtio id */
    pcidev_k->revision = 0x00;
    pcidev_k->class_id = PCI_CLASS_OTHERS;
}

static void vhost_user_balloon_pci_instance_init(Object *obj)
{
    VHostUserBalloonPCI *dev = VHOST_USER_BALLOON_PCI(obj);

    virtio_instance_init_common(obj, &dev->vdev, sizeof(dev->vdev),
                                TYPE_VHOST_USER_BALLOON);
}

static const VirtioPCIDeviceTypeInfo vhost_user_balloon_pci_info = {
    .base_name = TYPE_VHOST_USER_BALLOON_PCI,
    .non_transitional_name = "vhost-user-balloon-pci",
    .instance_size = sizeof(VHostUserBalloonPCI),
    .instance_init = vhost_user_balloon_pci_instance_init,
    .class_init = vhost_user_balloon_pci_class_init,
};

static void vhost_user_balloon_pci_register(void)
{
    virtio_pci_types_register(&vhost_user_balloon_pci_info);
}

type_init(vhost_user_balloon_pci_register);
