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

// String names the version, the Go release and, where Go has noted it, the commit.
func String() string {
	commit, dirty := "", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				commit = "commit " + s.Value[:min(12, len(s.Value))]
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = "-dirty"
			}
		}
	}
	if commit != "" {
		commit += dirty + ", "
	}
	return fmt.Sprintf("%s (%s%s)", Version, commit, runtime.Version())
}
