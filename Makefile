# The two commands: `make run` shows Corbel at work, `make test` checks it.
.PHONY: run test soak guests prepare build fmt

run: prepare
	@scripts/run.sh

test: prepare
	@scripts/prepare.sh tools
	@scripts/test.sh

# The long form of the checks: make soak SECONDS=N (3600).
SECONDS ?= 3600
soak: prepare
	@SECONDS_TOTAL=$(SECONDS) scripts/soak.sh

# Suites of others in a real guest, for each back end of a virtio-fs device, or for those named: make guests BACKENDS="corbel pair". Without
# names also a guest that is moved, corbel ublk under kernels that have its driver, and the tests of the back end nfs on the kernel's server.
guests: prepare
	@scripts/suites/guest.sh $(BACKENDS)
	@[ -n "$(BACKENDS)" ] || scripts/suites/move.sh
	@[ -n "$(BACKENDS)" ] || scripts/suites/ublk.sh
	@[ -n "$(BACKENDS)" ] || scripts/suites/knfsd.sh

prepare:
	@scripts/prepare.sh

build: prepare
	cargo build --release -p corbel

fmt:
	cargo fmt --all
