#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# OpenJDK with a heap of 192 MB
# packages: default-jdk-headless
mkdir -p /srv/java
cd /srv/java
if [ "${1:-}" = prepare ]; then
	cat >Words.java <<-'END'
		import java.util.*;

		class Words {
			public static void main(String[] args) {
				Map<String, Integer> count = new HashMap<>();
				for (int i = 0; i < 200000; i++)
					count.merge("word " + i * 7919L % 50021, 1, Integer::sum);
				List<String> words = new ArrayList<>(count.keySet());
				Collections.sort(words);
				System.out.println(words.size() + " " + words.hashCode());
			}
		}
	END
	javac Words.java
	exit
fi
# shellcheck disable=SC2086
java -Xms192m -Xmx192m ${JAVA_MORE:-} Words
