# SPDX-License-Identifier: Apache-2.0
# Copyright Authors of Cilium
#
# What makes `make test` fast on machines with few processors. Targets that a reader looks for are in the Makefile.

# The unit tests' flags. Without inlining a quarter less time goes into compiling, and nothing else is compiled with the race
# detector. Some packages' tests wait more than they work, so there are more at a time than processors.
COMPILE_RACE := -race -gcflags=all=-l
RACE := $(COMPILE_RACE) -p 3

.PHONY: compile-race
compile-race:
	@CGO_ENABLED=1 $(GO) list $(COMPILE_RACE) -export -deps -test $(UNIT) >/dev/null

# By the tests' programs as they are. To be guided by coverage they, and all they import, would be compiled once more.
.PHONY: test-fuzz-brief
test-fuzz-brief: ## Fuzz the same with 50,000 inputs each, as a part of make test.
	set -e; for f in $(FUZZ); do $(GOTEST) -count=1 -run '^$$' ./$${f%/*} \
		-args -test.fuzz="^$${f##*/}$$" -test.fuzztime=50000x -test.fuzzcachedir=$(CURDIR)/_out/fuzz; done
