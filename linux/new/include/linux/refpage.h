/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What architectures have to know of files from refpage_create(2).
 */
#ifndef _LINUX_REFPAGE_H
#define _LINUX_REFPAGE_H

#include <linux/types.h>

struct file;

#ifdef CONFIG_REFPAGE
bool is_refpage_file(const struct file *file);
#else
static inline bool is_refpage_file(const struct file *file)
{
	return false;
}
#endif

#endif /* _LINUX_REFPAGE_H */
