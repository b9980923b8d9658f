/* SPDX-License-Identifier: GPL-2.0 */
/*
 * kzeropaged: what the page allocator tells it.
 */
#ifndef __MM_PREZERO_H
#define __MM_PREZERO_H

#include <linux/jump_label.h>
#include <linux/mm_types.h>

#ifdef CONFIG_PREZERO_PAGE

DECLARE_STATIC_KEY_FALSE(prezero_active);

void __prezero_notify_free(struct page *page, unsigned int order);
void __prezero_notify_pool(int nid, unsigned long nr_pages);

#if IS_ENABLED(CONFIG_KUNIT)
struct page *prezero_next(struct list_head *list, unsigned long *scans);
int prezero_next_list(int list, unsigned int min_order, unsigned int end_order);
unsigned long prezero_debt_ms(unsigned long pages, unsigned long bytes_per_sec,
			      u64 elapsed_ns);
bool prezero_any_poisoned(struct page *page, unsigned int order);
#endif

/**
 * prezero_notify_free - A block has been added to a free list
 * @page: head page of the block
 * @order: order of the block
 *
 * Context: zone->lock is held.
 */
static inline void prezero_notify_free(struct page *page, unsigned int order)
{
	if (static_branch_unlikely(&prezero_active))
		__prezero_notify_free(page, order);
}

/**
 * prezero_notify_pool - A dirty folio has been added to a hugetlb pool
 * @nid: its node
 * @nr_pages: its size in pages
 *
 * Context: hugetlb_lock is held.
 */
static inline void prezero_notify_pool(int nid, unsigned long nr_pages)
{
	if (static_branch_unlikely(&prezero_active))
		__prezero_notify_pool(nid, nr_pages);
}

#else /* !CONFIG_PREZERO_PAGE */

static inline void prezero_notify_free(struct page *page, unsigned int order)
{
}

static inline void prezero_notify_pool(int nid, unsigned long nr_pages)
{
}

#endif /* CONFIG_PREZERO_PAGE */

#endif /* __MM_PREZERO_H */
