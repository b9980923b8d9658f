#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# OpenJDK with a heap of 192 MB, AlwaysPreTouch
# packages: default-jdk-headless
[ "${1:-}" != prepare ] || exit 0
JAVA_MORE=-XX:+AlwaysPreTouch exec sh -eu /programs/java.sh
