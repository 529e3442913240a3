// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Command faults tries what can go wrong around the driver, on emulated nodes with real Kubernetes: the agent ends, stops or
// is deleted at each of its crash points, and the runtime, kubelet, the API server, the node and its NIC fail. After each
// round the node has to be as it was before, no container may have started without its device, and no frame may have left
// outside of its VLAN. What became of each fault is a line of the report, which is written after every line; the exit status
// is not zero if anything is not as it has to be.
//
// It is run in the repository's root, by make test-faults.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// options are the command line's.
type options struct {
	only     *regexp.Regexp
	rounds   int
	short    bool
	budget   time.Duration
	programs string
	out      string
	resume   bool
	page     string
	seed     int64
	nodes    int
	// kubernetes is another version than the lab's own.
	kubernetes string
	keep       bool
	list       bool
}

func main() {
	var o options
	only := flag.String("only", "", "try faults alone whose name matches this regular expression")
	flag.IntVar(&o.rounds, "rounds", 0, "rounds of each fault, instead of what the fault has")
	flag.BoolVar(&o.short, "short", false, "the short form: one round of a chosen few")
	flag.DurationVar(&o.budget, "budget", 0, "begin no round after this time")
	flag.StringVar(&o.programs, "programs", filepath.Join("_out", "faults", "linux-amd64"), "directory of the programs, which are built with crash points")
	flag.StringVar(&o.out, "out", filepath.Join("_out", "faults"), "directory of the report, of logs of what failed, and of the cluster's data")
	flag.BoolVar(&o.resume, "resume", false, "add to the report that is there, and leave out rounds that it has")
	flag.StringVar(&o.page, "page", "", "write the report there too, as a page of the documentation")
	flag.Int64Var(&o.seed, "seed", 1, "seed of what is chosen at random")
	flag.IntVar(&o.nodes, "nodes", 1, "nodes to try faults on at the same time; some take two")
	flag.StringVar(&o.kubernetes, "kubernetes", "", "another version of Kubernetes that the lab has; its lines are apart from the others")
	flag.BoolVar(&o.keep, "keep", false, "leave the cluster up, and take the one that is up")
	flag.BoolVar(&o.list, "list", false, "print the faults and their rounds")
	other := flag.String(otherFlag, "", "be, on this node, another DRA driver that fails; faults start it by themselves")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	var err error
	if *other != "" {
		err = beOtherDriver(ctx, *other)
	} else if o.only, err = regexp.Compile(*only); err == nil {
		err = run(ctx, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	jobs := chosen(o)
	if len(jobs) == 0 {
		return errors.New("no fault's name matches")
	}
	if o.list {
		for _, j := range jobs {
			fmt.Printf("%-60s %3d  %s\n", j.name(), j.rounds, j.says)
		}
		return nil
	}
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	report, err := openReport(o)
	if err != nil {
		return err
	}
	if o.budget > 0 {
		// What is going on when the time is over is brought to its end.
		deadline := time.Now().Add(o.budget)
		report.over = func() bool { return time.Now().After(deadline) }
	}
	if slices.ContainsFunc(jobs, func(j job) bool { return report.missing(j) > 0 }) {
		if err := tryAll(ctx, o, jobs, report); err != nil {
			return err
		}
	} else if err := report.write(); err != nil { // as it would be written now
		return err
	}
	return report.verdict(jobs)
}

// chosen returns the faults to try, with their rounds.
func chosen(o options) []job {
	var jobs []job
	for _, j := range allJobs() {
		if !o.only.MatchString(j.name()) || j.two && o.nodes < 2 {
			continue
		}
		switch {
		case o.short && j.short == 0:
			continue
		case o.short:
			j.rounds = j.short
		}
		if o.rounds > 0 {
			j.rounds = o.rounds
		}
		if o.kubernetes != "" {
			j.group, j.says = versions, strings.TrimSuffix(fmt.Sprintf("Kubernetes %s, %s", o.kubernetes, j.says), ", ")
		}
		jobs = append(jobs, j)
	}
	return jobs
}
