// SPDX-License-Identifier: GPL-2.0
/*
 * MTE tags of pages that start with other content than zeros.
 */
#include <linux/align.h>
#include <linux/bitfield.h>
#include <linux/errno.h>
#include <linux/mm.h>
#include <linux/page_tags.h>
#include <linux/uaccess.h>

#include <asm/asm-extable.h>
#include <asm/cpufeature.h>
#include <asm/cputype.h>
#include <asm/mte.h>
#include <asm/mte-kasan.h>
#include <asm/sysreg.h>

static u64 address_with_tag(const void *addr, u8 tag)
{
	return ((u64)addr & ~MTE_TAG_MASK) | FIELD_PREP(MTE_TAG_MASK, tag);
}

/* Unlike mte_get_mem_tag(), not to be moved before a tag is written. */
static u8 kernel_tag(const void *addr)
{
	u64 found = (u64)addr;

	asm volatile(__MTE_PREAMBLE "ldg %0, [%0]"
		     : "+r" (found)
		     :
		     : "memory");

	return FIELD_GET(MTE_TAG_MASK, found);
}

/*
 * The CPU reads the tag the way user space would: it is 0 where the memory is
 * not mapped with PROT_MTE, whatever the page has.
 */
static int user_tag(const void __user *addr, u8 *tag)
{
	unsigned long found;
	int err = -EFAULT;

	found = (unsigned long)uaccess_mask_ptr(PTR_ALIGN_DOWN(addr, MTE_GRANULE_SIZE));

	uaccess_enable_privileged();
	asm volatile(__MTE_PREAMBLE
	"1:	ldg	%1, [%1]\n"
	"	mov	%w0, wzr\n"
	"2:\n"
	_ASM_EXTABLE_UACCESS(1b, 2b)
		     : "+r" (err), "+r" (found)
		     :
		     : "memory");
	uaccess_disable_privileged();

	*tag = FIELD_GET(MTE_TAG_MASK, found);

	return err;
}

/**
 * page_tags_read - Give a page the tags of user memory
 * @page: page that nobody else can see yet, exempt from KASAN
 * @from: address in user space; need not be aligned: a granule of @page gets the
 *	tag of the first of its bytes
 * @size: how many bytes of @page are from there, a power of two up to a page;
 *	they and their tags repeat. Less than a granule has no tags.
 *
 * A page whose tags are all 0 stays one without tags: they are cleared when it is
 * mapped with PROT_MTE, if it ever is.
 *
 * Context: Process context. May sleep, in page faults.
 * Return: 0, or -EFAULT if @from cannot be read.
 */
int page_tags_read(struct page *page, const void __user *from, size_t size)
{
	void *kaddr = page_address(page);
	u8 tag, any = 0;
	size_t at;

	if (!system_supports_mte() || size < MTE_GRANULE_SIZE)
		return 0;

	if (!access_ok(from, size))
		return -EFAULT;

	for (at = 0; at < PAGE_SIZE; at += MTE_GRANULE_SIZE) {
		if (at >= size)
			tag = kernel_tag(kaddr + at - size);
		else if (user_tag(from + at, &tag))
			return -EFAULT;

		__stg_post(address_with_tag(kaddr + at, tag));
		any |= tag;
	}

	if (any) {
		WARN_ON_ONCE(!try_page_mte_tagging(page));
		set_page_mte_tagged(page);
	}

	return 0;
}

/**
 * page_tags_of - Find out what tags a page has
 * @page: page whose tags nobody changes
 *
 * Return: The tag that all of @page has, 0 if it has none, or PAGE_TAGS_DIFFER.
 */
int page_tags_of(struct page *page)
{
	const void *kaddr = page_address(page);
	u8 tag;
	size_t at;

	if (!system_supports_mte() || !page_mte_tagged(page))
		return 0;

	tag = kernel_tag(kaddr);
	for (at = MTE_GRANULE_SIZE; at < PAGE_SIZE; at += MTE_GRANULE_SIZE)
		if (kernel_tag(kaddr + at) != tag)
			return PAGE_TAGS_DIFFER;

	return tag;
}

/**
 * page_tags_zero - Zero a page, and set its tags with the same stores
 * @page: page that nobody else can see yet, without tags
 * @tag: the tag, 0 to 15; of no use if there are no tags here
 */
void page_tags_zero(struct page *page, u8 tag)
{
	const u64 dczid = read_cpuid(DCZID_EL0);
	const u64 block = 4UL << FIELD_GET(DCZID_EL0_BS_MASK, dczid);
	u64 addr = address_with_tag(page_address(page), tag);
	const u64 end = addr + PAGE_SIZE;

	if (!system_supports_mte()) {
		clear_page(page_address(page));
		return;
	}

	WARN_ON_ONCE(!try_page_mte_tagging(page));

	if (dczid & DCZID_EL0_DZP_MASK) {
		while (addr != end)
			addr = __stzg_post(addr);
	} else {
		for (; addr != end; addr += block)
			__dc_gzva(addr);
	}

	set_page_mte_tagged(page);
}
