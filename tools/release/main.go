// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command release makes what a release has beside the container images: chart, archives of the kubectl plugin and of the CNI plugin,
// bill of materials and checksums. The same programs at the same commit give the same bytes on every machine: the commit's time is the only
// one, and nothing says who has built it, or where.
//
//	release check --version 0.1.0                  # whether this is the commit of that release
//	release pack --version 0.1.0 --programs DIR --dir DIR ...
//	release ndev --version v0.1.0 --dir DIR ...    # the kubectl plugin alone
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// source is what is released.
type source struct {
	repository string // its directory
	version    string
	revision   string
	time       time.Time // of the commit
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New("say check, pack or ndev")
	}
	var s source
	var programs, dir string
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.StringVar(&s.repository, "repository", ".", "directory of the repository")
	flags.StringVar(&s.version, "version", "", "version to release")
	flags.StringVar(&programs, "programs", "", "directory with the programs, in one named linux-amd64 and so on for each platform")
	flags.StringVar(&dir, "dir", "", "directory that gets the files")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if args[0] == "check" {
		return check(ctx, s.repository, s.version)
	}
	if err := s.readCommit(ctx); err != nil {
		return err
	}
	switch args[0] {
	case "pack":
		return s.pack(programs, dir)
	case "ndev":
		return s.packPlugin(dir, dir)
	default:
		return fmt.Errorf("%q is none of check, pack and ndev", args[0])
	}
}
