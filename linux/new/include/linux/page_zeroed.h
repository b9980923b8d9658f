/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Known-zero pages: what code outside mm/ may ask and must tell.
 *
 * See Documentation/mm/page_zeroed.rst.
 */
#ifndef _LINUX_PAGE_ZEROED_H
#define _LINUX_PAGE_ZEROED_H

#ifdef CONFIG_PAGE_ZEROED
const char *page_zeroed_obstacle(void);
void page_zeroed_forget_all(void);
#else
static inline const char *page_zeroed_obstacle(void)
{
	return "CONFIG_PAGE_ZEROED is not set";
}

static inline void page_zeroed_forget_all(void)
{
}
#endif

#endif /* _LINUX_PAGE_ZEROED_H */
