// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package program

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// version is set by the linker for a release: -X github.com/cilium/networkdriver/pkg/program.version=v1.2.3.
var version = "dev"

// Version says what was built, from which commit, and with which Go.
func Version() string {
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
	return fmt.Sprintf("%s (commit %s%s, %s)", version, commit, dirty, runtime.Version())
}
