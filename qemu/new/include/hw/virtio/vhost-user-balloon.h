/*
 * SPDX-License-Identifier: GPL-2.0-or-later
 *
 * Vhost-user memory balloon
 */

#ifndef QEMU_VHOST_USER_BALLOON_H
#define QEMU_VHOST_USER_BALLOON_H

#include "hw/virtio/vhost-user-base.h"

#define TYPE_VHOST_USER_BALLOON "vhost-user-balloon"
OBJECT_DECLARE_SIMPLE_TYPE(VHostUserBalloon, VHOST_USER_BALLOON)

struct VHostUserBalloon {
    VHostUserBase parent_obj;
};

#endif /* QEMU_VHOST_USER_BALLOON_H */
