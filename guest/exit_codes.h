/* SPDX-License-Identifier: GPL-2.0 */
/* The exit codes of the lab: 1 a check failed, 2 bad usage, 3 the machine cannot do it. */
#ifndef KZ_GUEST_EXIT_CODES_H
#define KZ_GUEST_EXIT_CODES_H

enum { KZ_OK = 0, KZ_FAILED = 1, KZ_USAGE = 2, KZ_BROKEN = 3 };

#endif
