// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Lint is staticcheck with the analyzers of go vet and our own. Each of the first two derives facts of all that a package imports, which is
// most of their work; in one program that is done once. Flags, exit codes and staticcheck.conf are staticcheck's.
package main

import (
	"os"
	"runtime/debug"

	"golang.org/x/tools/go/analysis/suite/vet"
	"honnef.co/go/tools/lintcmd"
	"honnef.co/go/tools/simple"
	"honnef.co/go/tools/staticcheck"
	"honnef.co/go/tools/stylecheck"
	"honnef.co/go/tools/unused"

	"github.com/cilium/networkdriver/tools/lint/dumps"
)

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // what it allocates it keeps
	}
	cmd := lintcmd.NewCommand("lint")
	cmd.ParseFlags(os.Args[1:])
	cmd.AddBareAnalyzers(vet.Suite...)
	cmd.AddBareAnalyzers(dumps.Analyzer)
	cmd.AddAnalyzers(simple.Analyzers...)
	cmd.AddAnalyzers(staticcheck.Analyzers...)
	cmd.AddAnalyzers(stylecheck.Analyzers...)
	cmd.AddAnalyzers(unused.Analyzer)
	cmd.Run()
}
