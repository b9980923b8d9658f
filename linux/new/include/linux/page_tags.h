/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Memory tags, where an architecture has them (arm64 with MTE): what a page has
 * besides its bytes, for pages that start with other content than zeros.
 */
#ifndef _LINUX_PAGE_TAGS_H
#define _LINUX_PAGE_TAGS_H

#include <linux/highmem.h>
#include <linux/types.h>

#define PAGE_TAGS_DIFFER	(-1)

#ifdef CONFIG_ARCH_HAS_PAGE_TAGS

int page_tags_read(struct page *page, const void __user *from, size_t size);
int page_tags_of(struct page *page);
void page_tags_zero(struct page *page, u8 tag);

#else /* !CONFIG_ARCH_HAS_PAGE_TAGS */

static inline int page_tags_read(struct page *page, const void __user *from,
				 size_t size)
{
	return 0;
}

static inline int page_tags_of(struct page *page)
{
	return 0;
}

/* Nobody asks for it: see page_tags_of(). But no page is to stay as it is. */
static inline void page_tags_zero(struct page *page, u8 tag)
{
	clear_highpage(page);
}

#endif /* CONFIG_ARCH_HAS_PAGE_TAGS */

#endif /* _LINUX_PAGE_TAGS_H */
