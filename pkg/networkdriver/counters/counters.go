// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package counters tells Prometheus what goes through the devices that pods have. It asks the kernel when it is asked itself, and not
// before: the counters of a link in a pod, wherever that is, without entering the pod's network namespace; and for a VF that a
// program drives, which has no link, its PF.
package counters

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/cilium/networkdriver/pkg/logonce"
	"github.com/cilium/networkdriver/pkg/networkdriver/tables"
	"github.com/cilium/networkdriver/pkg/rtlink"
)

const (
	// freshness is how long what was read is good for.
	freshness = 5 * time.Second
	// patience is how long a scrape waits for a NIC whose firmware is slow; then it gets what was read last.
	patience = 2 * time.Second
)

// Kernel reads counters.
type Kernel interface {
	// Link returns the counters of the interface with the index in the network namespace at the path, and the bus address of the device
	// that it belongs to, empty for none. There may be no such interface.
	Link(netns string, index int) (counters rtlink.Counters, parent string, found bool, err error)
	// VFs returns what the PF of the name tells of its VFs, by their index.
	VFs(pf string) (map[int]rtlink.Counters, error)
	Close()
}

// VF is a device that is a virtual function.
type VF interface {
	// PF returns the interface name of the VF's physical function, and the VF's index there.
	PF() (name string, vf int)
}

// Params are what a [Collector] works with.
type Params struct {
	Logger *slog.Logger
	DB     *statedb.DB
	// Allocations are the devices in use.
	Allocations statedb.Table[*tables.DRAAllocation]
	// Open opens the kernel for one reading.
	Open func() (Kernel, error)
	// Silent is told which PFs tell no counters of VFs that programs drive, sorted, when they are others than before.
	Silent func(pfs []string)
	// Now is the time.
	Now func() time.Time
}

// Collector is a [prometheus.Collector].
type Collector struct {
	Params
	last atomic.Pointer[[]prometheus.Metric]
	// turn is held by who reads, and guards the fields below.
	turn chan struct{}
	read time.Time
	// heard are the PFs that have told of traffic once, and so do when there is none.
	heard  map[string]bool
	silent []string
	failed logonce.Problems[string]
}

// New returns a collector.
func New(p Params) *Collector {
	return &Collector{Params: p, turn: make(chan struct{}, 1), heard: map[string]bool{}}
}

// Describe implements [prometheus.Collector].
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	for _, f := range families {
		out <- f.desc
	}
}

// Collect implements [prometheus.Collector].
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	late := time.After(patience)
	select {
	case c.turn <- struct{}{}:
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { <-c.turn }()
			c.refresh()
		}()
		select {
		case <-done:
		case <-late:
		}
	case <-late:
	}
	if metrics := c.last.Load(); metrics != nil {
		for _, m := range *metrics {
			out <- m
		}
	}
}

// refresh reads the counters anew if they are not fresh.
func (c *Collector) refresh() {
	if c.last.Load() != nil && c.Now().Sub(c.read) < freshness {
		return
	}
	var metrics []prometheus.Metric
	var problems []string
	if kernel, err := c.Open(); err != nil {
		problems = []string{err.Error()}
	} else {
		metrics, problems = c.collect(kernel)
		kernel.Close()
	}
	for _, problem := range c.failed.Replace(problems...) {
		c.Logger.Warn("Counters of a device cannot be read, it has no metrics of its traffic", "error", problem)
	}
	c.last.Store(&metrics)
	c.read = c.Now()
}

func (c *Collector) collect(kernel Kernel) (metrics []prometheus.Metric, problems []string) {
	pfs := map[string]map[int]rtlink.Counters{}
	silent := map[string]bool{}
	for row := range c.Allocations.All(c.DB.ReadTxn()) {
		pf, vf := "", 0
		if dev, ok := row.PreparedDevice.(VF); ok {
			pf, vf = dev.PF()
		}
		var counters rtlink.Counters
		found, err := false, error(nil)
		switch {
		case isInPod(row):
			counters, found, err = link(kernel, row)
		case isDriven(row) && pf != "":
			if _, asked := pfs[pf]; !asked {
				if pfs[pf], err = kernel.VFs(pf); err != nil {
					err = fmt.Errorf("counters of the VFs of PF %s: %w", pf, err)
				}
				c.heard[pf] = c.heard[pf] || slices.ContainsFunc(slices.Collect(maps.Values(pfs[pf])), func(c rtlink.Counters) bool { return c != rtlink.Counters{} })
			}
			counters, found = pfs[pf][vf]
			if found = found && c.heard[pf]; !found {
				silent[pf] = true
			}
		}
		if err != nil {
			problems = append(problems, err.Error())
		}
		if !found {
			continue
		}
		for _, f := range families {
			metrics = append(metrics, prometheus.MustNewConstMetric(f.desc, prometheus.CounterValue, float64(f.value(counters)),
				row.DeviceName, pf, row.Pool, row.Config.Network, row.ClaimNamespace, row.PodName, row.ClaimName))
		}
	}
	if now := slices.Sorted(maps.Keys(silent)); !slices.Equal(now, c.silent) {
		c.silent = now
		c.Silent(now)
	}
	return metrics, problems
}

// isInPod says whether the device's link is where it was put.
func isInPod(row *tables.DRAAllocation) bool {
	return row.Attachment != nil && !row.Attachment.Moved && row.Attachment.IfIndex != 0
}

// isDriven says whether the device is in use and has no link that could be asked: a program drives it, or its pod has moved the link.
func isDriven(row *tables.DRAAllocation) bool {
	return row.Config.Driver != "" || row.Attachment != nil || row.PreparedDevice.Link().IsZero()
}

// link returns the counters of a device's link. One that is another device's by now has none.
func link(kernel Kernel, row *tables.DRAAllocation) (rtlink.Counters, bool, error) {
	counters, parent, found, err := kernel.Link(row.Attachment.NetNS, row.Attachment.IfIndex)
	if err != nil {
		return rtlink.Counters{}, false, fmt.Errorf("counters of device %s in pod %s: %w", row.DeviceName, row.Pod(), err)
	}
	return counters, found && parent == row.PreparedDevice.Link().Device, nil
}
