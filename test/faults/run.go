// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// upTimeout bounds the start of the cluster when everything is built.
const upTimeout = 10 * time.Minute

// tryAll boots a cluster and tries the jobs in it, those first that the agent need not be a pod for.
func tryAll(ctx context.Context, o options, jobs []job, r *report) (err error) {
	upCtx, cancel := context.WithTimeout(ctx, upTimeout)
	defer cancel()
	l, err := lab.Ensure(upCtx, lab.Options{
		BuildOptions: lab.BuildOptions{Progress: os.Stdout, Kubernetes: o.kubernetes}, Nodes: o.nodes, State: filepath.Join(o.out, "state"), Detach: o.keep,
	})
	if err != nil {
		return fmt.Errorf("start the lab: %w", err)
	}
	if !o.keep {
		defer func() { err = errors.Join(err, l.Down()) }()
	}
	c, err := deploy.Connect(l)
	if err != nil {
		return err
	}
	var benches []*bench
	for _, n := range l.Nodes() {
		benches = append(benches, newBench(c, n, o))
	}
	if len(benches) > 1 {
		benches[0].beside = benches[1]
	}
	for _, phase := range []struct {
		as      as
		enter   func(context.Context, *deploy.Cluster, options) error
		benches []*bench
	}{
		{daemon, asDaemon, benches},
		{alone, asDaemon, benches[:1]},
		{pod, asPod, benches},
	} {
		mine := slices.DeleteFunc(slices.Clone(jobs), func(j job) bool { return j.as != phase.as || r.missing(j) == 0 })
		if len(mine) == 0 || ctx.Err() != nil || r.over() {
			continue
		}
		if err := phase.enter(ctx, c, o); err != nil {
			return fmt.Errorf("install the driver: %w", err)
		}
		if err := work(ctx, phase.benches, mine, r); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// work gives the rounds of the jobs to the benches, each of which does one at a time.
func work(ctx context.Context, benches []*bench, jobs []job, r *report) error {
	type task struct {
		job
		number int
	}
	tasks := make(chan task)
	var wg sync.WaitGroup
	errs := make([]error, len(benches))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for i, b := range benches {
		wg.Go(func() {
			errs[i] = func() (err error) {
				if b.beside != nil && slices.ContainsFunc(jobs, func(j job) bool { return j.two }) {
					if err := b.beside.prepare(ctx); err != nil {
						return err
					}
					defer func() { err = errors.Join(err, b.beside.leave(ctx)) }()
				}
				if err := b.prepare(ctx); err != nil {
					return err
				}
				for t := range tasks {
					done, err := b.try(ctx, t.job, t.number)
					if err == nil {
						err = r.add(t.job, done)
					}
					if err != nil {
						return fmt.Errorf("%s: %w", t.name(), err)
					}
				}
				return b.leave(ctx)
			}()
			if errs[i] != nil {
				cancel() // nobody goes on alone
			}
		})
	}
	func() {
		defer close(tasks)
		for _, j := range jobs {
			missing := r.missing(j)
			for n := j.rounds - missing; n < j.rounds; n++ {
				if r.over() {
					return
				}
				select {
				case tasks <- task{j, n}:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	wg.Wait()
	return errors.Join(errs...)
}
