/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the rest of mm/ has to know of mappings made from refpage_create(2).
 */
#ifndef __MM_REFPAGE_H
#define __MM_REFPAGE_H

#include <linux/mm.h>

#ifdef CONFIG_REFPAGE

extern const struct vm_operations_struct refpage_vm_ops;

/*
 * Does @vma map a reference page? It may hold anonymous pages, and the zero page
 * besides: look at the page as well.
 */
static inline bool vma_is_refpage(const struct vm_area_struct *vma)
{
	return vma->vm_ops == &refpage_vm_ops;
}

/*
 * May a core dump have a hole where @vma shows the reference page? Nobody has
 * written there. The pattern is dumped if private file mappings are, too.
 */
static inline bool refpage_leave_hole(const struct vm_area_struct *vma)
{
	return vma_is_refpage(vma) &&
	       !mm_flags_test(MMF_DUMP_MAPPED_PRIVATE, vma->vm_mm);
}

#else /* !CONFIG_REFPAGE */

static inline bool vma_is_refpage(const struct vm_area_struct *vma)
{
	return false;
}

static inline bool refpage_leave_hole(const struct vm_area_struct *vma)
{
	return false;
}

#endif /* CONFIG_REFPAGE */

#endif /* __MM_REFPAGE_H */
