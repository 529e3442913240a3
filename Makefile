# SPDX-License-Identifier: Apache-2.0
# Copyright Authors of Cilium

SHELL := /bin/bash
GO ?= go
VERSION ?= $(shell git describe --always --dirty 2>/dev/null || echo unknown)

# One set of flags for everything but the race detector, the lab's Kubernetes included, so that each package is compiled
# once.
export CGO_ENABLED := 0
# grpcnotrace leaves out the debug pages of grpc, and with them what keeps the linker from removing unused code.
export GOFLAGS := $(GOFLAGS) -trimpath -tags=grpcnotrace
GOBUILD := $(GO) build -ldflags "-s -w -X github.com/cilium/networkdriver/pkg/version.Version=$(VERSION)"
# What go vet says of all packages is asked for once, by lint.
GOTEST := $(GO) test -vet=off
LAB := bin/lab
HELM := bin/helm
NODES ?= 1
FUZZTIME ?= 1m
CRASH ?= 50x20
STEPS ?= 1000000
CHART := install/helm/cilium-network-driver
CILIUMNODE := install/kubernetes/ciliumnode-crd.yaml
# Where make generate writes.
GENERATED := api $(CHART)/files Documentation/api.md
# The images' tag is the chart's unless another is given.
IMAGE_TAG ?= $(shell sed -n 's/^appVersion: //p' $(CHART)/Chart.yaml)
IMAGE_ARCHS ?= amd64 arm64
IMAGES := _out/images
# What the kubectl plugin is built for.
NDEV_PLATFORMS ?= linux/amd64 linux/arm64
NDEV := _out/kubectl-ndev
RELEASE := _out/release
RELEASE_PROGRAMS := _out/release-programs
# Where compiled packages are kept.
RELEASE_CACHE ?= $(shell $(GO) env GOCACHE)
FAULTS := _out/faults
# The packages with unit tests.
UNIT := ./api/... ./cmd/... ./internal/... ./operator/... ./pkg/... ./test/faults ./test/lab/... ./test/nodestate ./test/versions
# The packages with tests against a real API server, which are named TestAPI. The chart's are in the module of the tools.
API := ./api/v2alpha1 ./cmd/cilium-operator ./operator/pkg/networkdriver/config ./operator/pkg/networkdriver/networks ./pkg/networkdriver/ciliumnode \
	./pkg/ndev ./pkg/networkdriver/claims ./pkg/networkdriver/networks ./pkg/networkdriver/nodeconfig ./test/docs ./test/lab
# What is fuzzed, as package/target.
FUZZ = $(shell grep -r --include='*_test.go' '^func Fuzz' pkg | sed -E 's,[^/]*:func (\w+).*,\1,')

.PHONY: all
all: build

.PHONY: build
build: ## Build the programs into bin/.
	$(GOBUILD) -o bin/ ./cmd/...

# Without what Go itself finds out about the repository, which it does not in every kind of checkout: the version says it.
.PHONY: programs
programs: ## Build the programs for each architecture, into _out/images.
	@for arch in $(IMAGE_ARCHS); do \
		rm -rf $(IMAGES)/linux-$$arch && GOOS=linux GOARCH=$$arch $(GOBUILD) -buildvcs=false -o $(IMAGES)/linux-$$arch/ ./cmd/... || exit 1; \
	done

.PHONY: images
images: programs bin/images ## Pack agent and operator into container images for each architecture, as tar files in _out/images.
	@bin/images --dir $(IMAGES) --tag $(IMAGE_TAG) --revision "$$(git rev-parse HEAD 2>/dev/null)" \
		--arch "$(IMAGE_ARCHS)"

.PHONY: kubectl-ndev
kubectl-ndev: bin/release ## Pack the kubectl plugin ndev for each of NDEV_PLATFORMS, with Krew's manifest, in _out/kubectl-ndev.
	@rm -rf $(NDEV)
	@set -e; for platform in $(NDEV_PLATFORMS); do \
		GOOS=$${platform%/*} GOARCH=$${platform#*/} $(GOBUILD) -buildvcs=false -o $(NDEV)/$${platform%/*}-$${platform#*/}/ ./cmd/kubectl-ndev; \
	done
	@bin/release ndev --version $(VERSION) --dir $(NDEV)

# The processors that the programs are for are said here, so that whoever builds has no say in it.
.PHONY: release
release: export GOAMD64 = v1
release: export GOARM64 = v8.0
release: bin/images bin/release ## Make the release VERSION of what is committed, for each architecture, in _out/release.
	@bin/release check --version "$(VERSION)"
	@rm -rf $(RELEASE) $(RELEASE_PROGRAMS) && mkdir -p $(RELEASE)
	@GOCACHE="$(RELEASE_CACHE)" $(MAKE) --no-print-directory programs VERSION=v$(VERSION) IMAGES=$(RELEASE_PROGRAMS)
	@bin/images --dir $(RELEASE_PROGRAMS) --tag $(VERSION) --revision "$$(git rev-parse HEAD)" --arch "$(IMAGE_ARCHS)" >/dev/null
	@mv $(RELEASE_PROGRAMS)/*.tar $(RELEASE)/
	@bin/release pack --version $(VERSION) --programs $(RELEASE_PROGRAMS) --dir $(RELEASE)
	@cat $(RELEASE)/SHA256SUMS

# In a clone elsewhere and with all compiled anew: what the release is must depend on neither.
.PHONY: check-release
check-release: release ## Make the release VERSION again, elsewhere and from nothing, and compare. Up to an hour; not part of make test.
	@set -e; again=$$(mktemp -d); trap 'rm -rf $$again' EXIT; git clone -q . $$again/clone; \
		$(MAKE) --no-print-directory -C $$again/clone release VERSION=$(VERSION) RELEASE_CACHE=$$again/cache >/dev/null; \
		diff $(RELEASE)/SHA256SUMS $$again/clone/$(RELEASE)/SHA256SUMS; \
		cd $$again/clone/$(RELEASE); sha256sum -c --quiet SHA256SUMS; echo "both are the same"

$(LAB): FORCE
	@$(GOBUILD) -o $@ ./test/lab/cmd/lab
FORCE:

# Tools have a module of their own, so that an application that imports the driver requires none of them. They are built and
# run, not called by `go tool`, which passes over GOFLAGS and so compiles all that they import once more.
TOOLS := bin/controller-gen bin/crd-ref-docs $(HELM) bin/images bin/lint bin/release
bin/controller-gen: TOOL := sigs.k8s.io/controller-tools/cmd/controller-gen
bin/crd-ref-docs: TOOL := github.com/elastic/crd-ref-docs
$(HELM): TOOL := helm.sh/helm/v4/cmd/helm
bin/images: TOOL := ./images
bin/lint: TOOL := ./lint
bin/release: TOOL := ./release
$(TOOLS): FORCE
	@cd tools && $(GO) build -buildvcs=false -ldflags "-s -w" -o ../$@ $(TOOL)

.PHONY: setup
setup: ## Check for the few Debian packages that building and testing need, and install what is missing.
	@./test/setup.sh

.PHONY: test
test: setup lint check-generate test-fuzz-brief test-integration ## Run every test, as CI does.
	.ci/meanwhile '$(MAKE) compile-race' $(MAKE) test-e2e test-faults-short
	$(MAKE) test-unit

.PHONY: lint
lint: bin/lint ## gofmt, what go vet and staticcheck find, licence headers.
	@fmt=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$fmt" ]; then echo "gofmt would change:"; echo "$$fmt"; exit 1; fi
	@missing=$$(git ls-files '*.go' | xargs grep -L 'SPDX-License-Identifier: Apache-2.0'); if [ -n "$$missing" ]; then echo "no SPDX header:"; echo "$$missing"; exit 1; fi
	bin/lint ./...
	cd tools && ../bin/lint ./...

.PHONY: generate
generate: bin/controller-gen bin/crd-ref-docs ## Generate deepcopy functions, CRDs and their page in Documentation from the API types, and the chart's copies of the CRDs.
	bin/controller-gen object:headerFile=api/boilerplate.go.txt paths=./api/v2alpha1
	bin/controller-gen crd paths=./api/v2alpha1 output:crd:dir=./api/crds
	cp api/crds/*.yaml $(CHART)/files/crds/
	bin/crd-ref-docs --config api/docs/config.yaml --templates-dir api/docs/templates --renderer markdown \
		--source-path api/v2alpha1 --output-path Documentation/api.md --log-level ERROR
	$(if $(wildcard $(CILIUMNODE)),cp $(CILIUMNODE) $(CHART)/files/)

.PHONY: check-generate
check-generate: generate ## Fail when generated files are not up to date.
	@diff=$$(git status --porcelain -- $(GENERATED)); if [ -n "$$diff" ]; then echo "make generate changed files that are not committed:"; echo "$$diff"; git diff -- $(GENERATED) | head -50; exit 1; fi

# They are part of the commit that is released, so that a clean clone has what its own release must not break.
.PHONY: release-crds
release-crds: ## Keep the CRDs as those of release VERSION, which no later one may break.
	@[[ "$(VERSION)" =~ ^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$$ ]] || { echo "VERSION=$(VERSION) is not a version such as 1.2.3"; exit 1; }
	@if git rev-parse -q --verify "refs/tags/v$(VERSION)" >/dev/null; then echo "v$(VERSION) is released: its CRDs stay as they are"; exit 1; fi
	rm -rf api/released/v$(VERSION) && mkdir -p api/released/v$(VERSION) && cp api/crds/*.yaml api/released/v$(VERSION)/
	cd tools && $(GOTEST) -count=1 ./crdcompat

.PHONY: golden
golden: ## Write what the chart renders to its golden files, and its values to Documentation, after a wanted change.
	cd tools && $(GOTEST) ./chart -update

# The tools' tests read files of the other module, and a result that go test keeps counts for changes in its own alone.
.PHONY: test-unit
test-unit: export NETWORKDRIVER_REQUIRE = $(shell [ $$(id -u) = 0 ] && echo privileged)
test-unit: ## Unit, cell and privileged tests, with the race detector but for the simulation, the pages' and the tools'. Privileged ones run as root.
	CGO_ENABLED=1 $(GOTEST) $(RACE) $(UNIT)
	$(GOTEST) ./test/simulation ./test/docs
	cd tools && $(GOTEST) -count=1 ./...

.PHONY: test-fuzz
test-fuzz: ## Fuzz what reads claims, records and configurations, FUZZTIME (1m) each.
	set -e; for f in $(FUZZ); do $(GOTEST) -run '^$$' -fuzz "^$${f##*/}$$" -fuzztime $(FUZZTIME) ./$${f%/*}; done

.PHONY: test-crash
test-crash: ## Kill the CNI plugin anywhere, with CRASH (50x20) NICs x rounds. Minutes; needs root. Not part of make test.
	NETWORKDRIVER_REQUIRE=privileged NETWORKDRIVER_CRASH=$(CRASH) $(GOTEST) -count=1 -v -timeout 60m -run '^TestKilledAnywhere$$' ./pkg/hostdevice

.PHONY: test-simulation
test-simulation: ## The driver on a simulated node, where everything goes wrong: STEPS (1000000) steps, or one SEED with its trace. Minutes; a short one is part of test-unit.
	NETWORKDRIVER_SIMULATION_STEPS=$(STEPS) NETWORKDRIVER_SIMULATION_SEED=$(SEED) $(GOTEST) -count=1 -v -timeout 60m -run '^TestSimulation$$' ./test/simulation

.PHONY: test-integration
test-integration: $(LAB) ## Tests against a real kube-apiserver and etcd.
	$(LAB) build --control-plane
	NETWORKDRIVER_REQUIRE=api NETWORKDRIVER_KUBE_BIN=$$($(LAB) bin-dir) $(GOTEST) -count=1 -p 2 -run '^TestAPI' $(API)
	cd tools && NETWORKDRIVER_REQUIRE=api NETWORKDRIVER_KUBE_BIN=$$(../$(LAB) bin-dir) $(GOTEST) -count=1 -run '^TestAPI' ./chart

.PHONY: test-e2e
test-e2e: IMAGE_ARCHS = amd64
test-e2e: images $(HELM) $(LAB) ## Tests on emulated nodes with real Kubernetes, containerd, NRI and SR-IOV. Needs root.
	cp $(IMAGES)/linux-amd64/* bin/
	$(LAB) build
	NETWORKDRIVER_REQUIRE=lab $(GOTEST) -count=1 -v -timeout 60m -parallel 2 ./test/e2e

.PHONY: faults-programs
faults-programs: bin/images $(HELM) $(LAB) ## The programs with crash points, in which the fault matrix has them end.
	GOOS=linux GOARCH=amd64 $(GOBUILD) -tags=grpcnotrace,crashpoints -buildvcs=false -o $(FAULTS)/linux-amd64/ ./cmd/...
	@bin/images --dir $(FAULTS) --tag $(IMAGE_TAG) --arch amd64
	$(LAB) build

.PHONY: test-faults
test-faults: faults-programs ## Every fault around the driver, on an emulated node. Hours; FAULTS_FLAGS="--only regexp --budget 20m --resume" for a part.
	$(GO) run ./test/faults --nodes 2 $(FAULTS_FLAGS)

.PHONY: test-faults-short
test-faults-short: faults-programs ## A chosen few of them, once each, as a part of make test.
	$(GO) run ./test/faults --short --nodes 2

.PHONY: test-versions
test-versions: IMAGE_ARCHS = amd64
test-versions: images $(HELM) $(LAB) ## Attach and detach on each Kubernetes and containerd that the lab has, as a table; ONLY=containerd-1.7 for some. An hour; not part of make test.
	cp $(IMAGES)/linux-amd64/* bin/
	@$(GO) run ./test/versions --only "$(ONLY)"

.PHONY: test-lab
test-lab: $(LAB) ## Tests of the lab itself: reboots, power cuts, frames on the wire. Not part of make test.
	$(LAB) build
	NETWORKDRIVER_REQUIRE=lab $(GOTEST) -count=1 -v -timeout 40m -run '^TestLab$$' ./test/lab

.PHONY: bench
bench: ## Benchmarks; ratios are of one run on this machine.
	$(GOTEST) -run '^$$' -bench . -benchmem ./operator/... ./pkg/...

.PHONY: bench-api
bench-api: $(LAB) ## On a real API server: the operator over 5,000 nodes and 50 cluster configs, and networks of 101,000 addresses. Takes minutes.
	$(LAB) build --control-plane
	NETWORKDRIVER_REQUIRE=api NETWORKDRIVER_KUBE_BIN=$$($(LAB) bin-dir) $(GOTEST) -run '^$$' -bench '^BenchmarkAPI$$' -benchtime 1x -timeout 30m ./operator/pkg/networkdriver/config
	NETWORKDRIVER_REQUIRE=api NETWORKDRIVER_KUBE_BIN=$$($(LAB) bin-dir) $(GOTEST) -run '^$$' -bench '^BenchmarkAPIAddresses$$' -benchtime 1x -timeout 60m ./pkg/networkdriver/claims

.PHONY: demo
demo: IMAGE_ARCHS = amd64
demo: setup images $(HELM) $(LAB) ## Boot a cluster with emulated SR-IOV, use the driver in it, and leave it up. NODES=2 for two nodes.
	$(LAB) build
	$(GO) run ./test/demo --nodes $(NODES)

.PHONY: demo-down
demo-down: $(LAB) ## Stop the demo's cluster.
	$(LAB) down

.PHONY: clean
clean: ## Remove build output; the lab's cache stays.
	rm -rf bin _out

# What makes the tests fast on small machines.
include .ci/small.mk

.PHONY: help
help:
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20
