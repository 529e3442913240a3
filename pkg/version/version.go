// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package version says what was built.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Version is set by the linker: -X github.com/cilium/networkdriver/pkg/version.Version=v1.2.3.
var Version = "dev"

// String names the version, the commit and the Go release.
func String() string {
	commit, dirty := "unknown", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				commit = s.Value[:min(12, len(s.Value))]
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = "-dirty"
			}
		}
	}
	return fmt.Sprintf("%s (commit %s%s, %s)", Version, commit, dirty, runtime.Version())
}
