// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package testenv says what a test needs of its environment. A test whose need is not met is skipped with a reason,
// unless the environment promises it: NETWORKDRIVER_REQUIRE lists promises (privileged, api, lab), and a promise that
// is not kept fails the test. That way no test is skipped unnoticed in CI.
package testenv

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	requireEnv = "NETWORKDRIVER_REQUIRE"
	kubeBinEnv = "NETWORKDRIVER_KUBE_BIN"
	labPFEnv   = "NETWORKDRIVER_LAB_PF"
)

func missing(tb testing.TB, need, reason string) {
	tb.Helper()
	if slices.Contains(strings.Split(os.Getenv(requireEnv), ","), need) {
		tb.Fatalf("%s=%s is promised, but %s", requireEnv, need, reason)
	}
	tb.Skipf("needs %s: %s", need, reason)
}

// Privileged is for tests that make network namespaces and links.
func Privileged(tb testing.TB) {
	tb.Helper()
	if os.Geteuid() != 0 {
		missing(tb, "privileged", "the test does not run as root")
	}
}

// KubeBin is for tests against a real API server. It returns the directory that holds kube-apiserver and etcd.
func KubeBin(tb testing.TB) string {
	tb.Helper()
	dir := os.Getenv(kubeBinEnv)
	if dir == "" {
		missing(tb, "api", kubeBinEnv+" does not name a directory with kube-apiserver and etcd")
	}
	for _, name := range []string{"kube-apiserver", "etcd"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			missing(tb, "api", err.Error())
		}
	}
	return dir
}

// LabPF is for tests on an emulated node. It returns the name of an SR-IOV PF the test may use as it likes.
func LabPF(tb testing.TB) string {
	tb.Helper()
	Privileged(tb)
	pf := os.Getenv(labPFEnv)
	if pf == "" {
		missing(tb, "lab", labPFEnv+" does not name an SR-IOV physical function")
	}
	return pf
}
