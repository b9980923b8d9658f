/* SPDX-License-Identifier: GPL-2.0 */
/* Shared parts of the lab's TCG plugins. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <qemu-plugin.h>

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

/* The value of an argument "name=value", or NULL with a message. */
static inline const char *plugin_argument(const char *argument, const char *name)
{
	const size_t len = strlen(name);

	if (argument && !strncmp(argument, name, len) && argument[len] == '=')
		return argument + len + 1;
	fprintf(stderr, "plugin: '%s' is not %s=FILE\n", argument ? argument : "", name);
	return NULL;
}

/* Kernel addresses are the upper half. */
static inline bool plugin_is_kernel(uint64_t address)
{
	return address >> 63;
}

/* A new file of @size bytes, mapped for the lab to read at any time; NULL with a message. */
static inline void *plugin_share(const char *path, size_t size)
{
	const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	void *at = MAP_FAILED;

	if (fd >= 0 && !ftruncate(fd, (off_t)size))
		at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		perror(path);
	if (fd >= 0)
		close(fd);
	return at == MAP_FAILED ? NULL : at;
}
