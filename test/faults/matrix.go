// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/cilium/networkdriver/internal/crashpoint"
	"github.com/cilium/networkdriver/test/deploy"
)

// Faults at a point.
const (
	kill   = "KILL"
	stop   = "SIGSTOP"
	remove = "pod deleted"
)

// job is one fault to try.
type job struct {
	group, fault, says string
	// as is how the agent has to run, and rounds how often the whole form tries the fault, short the short form.
	as            as
	rounds, short int
	// two says that it takes the bench beside this one as well.
	two bool
	run func(ctx context.Context, b *bench, number int) error
}

// as is how the agent runs.
type as int

const (
	// daemon is a process of the node.
	daemon as = iota
	// alone is a daemon too, and nothing else is tried in the cluster at the time.
	alone
	// pod is as users have it.
	pod
)

func (j job) name() string {
	return j.group + "/" + strings.ReplaceAll(strings.TrimSpace(j.says+" "+j.fault), " ", "-")
}

// phase is what makes the agent come to a point.
type phase int

const (
	starting phase = iota // pods start
	ending                // pods end
	booting               // the agent starts
)

// place is a point with what comes there.
type place struct {
	point crashpoint.Point
	says  string
	when  phase
	// after is how long after the point it happens.
	after time.Duration
	// many says that there are 20 rounds in the whole form: what is interrupted is a change of the kernel's.
	many bool
	// vfio says that what comes there is a VF whose driver changes.
	vfio bool
	// short are the faults at this point that the short form has.
	short []string
}

var places = []place{
	{crashpoint.JournalBefore, "before the journal's entry", starting, 0, false, false, nil},
	{crashpoint.JournalAfter, "after the journal's entry", starting, 0, false, false, nil},
	{crashpoint.AddressBefore, "before an address is taken", starting, 0, false, false, nil},
	{crashpoint.AddressAfter, "after an address is taken", starting, 0, false, false, nil},
	{crashpoint.SetupBefore, "before Setup", starting, 0, false, false, nil},
	{crashpoint.DriverChosen, "before the driver is unbound", starting, 0, false, true, nil},
	{crashpoint.DriverUnbound, "after the driver is unbound", starting, 0, false, true, []string{kill}},
	{crashpoint.DriverBound, "after vfio-pci is bound", starting, 0, false, true, nil},
	{crashpoint.SetupAfter, "after Setup", starting, 0, false, false, []string{kill}},
	{crashpoint.StatusBefore, "before the claim's status", starting, 0, false, false, nil},
	{crashpoint.StatusAfter, "after the claim's status", starting, 0, false, false, nil},
	{crashpoint.RowBefore, "before the allocation's row", starting, 0, false, false, nil},
	{crashpoint.RowAfter, "after the allocation's row", starting, 0, false, false, nil},
	{crashpoint.Prepared, "at Prepare's answer", starting, 0, false, false, nil},
	{crashpoint.Prepared, "between Prepare and sandbox", starting, 100 * time.Millisecond, false, false, []string{kill}},
	{crashpoint.SandboxRun, "when the sandbox starts", starting, 0, false, false, nil},
	{crashpoint.AttachBefore, "before the move into the pod", starting, 0, true, false, nil},
	{crashpoint.AttachMoved, "after the move into the pod", starting, 0, true, false, []string{kill, stop, remove}},
	{crashpoint.MetadataBefore, "before the metadata file", starting, 0, true, false, nil},
	{crashpoint.MetadataAfter, "after the metadata file", starting, 0, true, false, nil},
	{crashpoint.CDIBefore, "before the CDI file", starting, 0, true, false, nil},
	{crashpoint.CDIAfter, "after the CDI file", starting, 0, true, false, nil},
	{crashpoint.DetachBefore, "before the move home", ending, 0, true, false, nil},
	{crashpoint.DetachMoved, "after the move home", ending, 0, true, false, []string{kill}},
	{crashpoint.DetachRestored, "after the link is restored", ending, 0, true, false, nil},
	{crashpoint.SandboxStopped, "between StopPodSandbox and Unprepare", ending, 50 * time.Millisecond, false, false, nil},
	{crashpoint.UnprepareBefore, "before Unprepare", ending, 0, false, false, nil},
	{crashpoint.FreeBefore, "before Free", ending, 0, true, false, nil},
	{crashpoint.DriverCleared, "before vfio-pci is unbound", ending, 0, false, true, nil},
	{crashpoint.DriverReleased, "after vfio-pci is unbound", ending, 0, false, true, nil},
	{crashpoint.DriverBack, "after the driver is back", ending, 0, false, true, nil},
	{crashpoint.FreeVLAN, "after the VLAN is back", ending, 0, true, false, []string{kill}},
	{crashpoint.FreeAfter, "after Free", ending, 0, true, false, nil},
	{crashpoint.AddressReturned, "after an address is given back", ending, 0, false, false, nil},
	{crashpoint.Forgotten, "after the journal's entry is removed", ending, 0, false, false, nil},
	{crashpoint.Unprepared, "after Unprepare's answer", ending, 50 * time.Millisecond, false, false, nil},
	{crashpoint.PublishBefore, "before publication", booting, 0, false, false, nil},
	{crashpoint.PublishAfter, "after publication", booting, 0, false, false, nil},
	{crashpoint.RestoreBefore, "before the restored rows", booting, 0, false, false, nil},
	{crashpoint.RestoreRows, "after the restored rows", booting, 0, false, false, []string{kill}},
}

// matrix is each fault at each point.
func matrix() []job {
	var jobs []job
	for i, p := range places {
		for k, fault := range []string{kill, stop, remove} {
			j := job{group: "agent", fault: fault, says: p.says, rounds: 5, run: func(ctx context.Context, b *bench, number int) error {
				return b.interrupt(ctx, p, fault, number, kindsOf(i+k+number))
			}}
			if p.many {
				j.rounds = 20
			}
			if fault == remove {
				j.as = pod
			}
			for _, s := range p.short {
				if s == fault {
					j.short = 1
				}
			}
			jobs = append(jobs, j)
		}
	}
	return jobs
}

// kindsOf are the pods of a round: a VF's, whose containers are of another shape from round to round and from place to place, and
// one with addresses beside it, another VF's or a dummy's.
func kindsOf(number int) []kind {
	kinds := []kind{
		{template: "vf", vlan: vlans[number%3], shape: shapes[number%len(shapes)]},
		{template: netVF, shape: shapes[(number+1)%len(shapes)]},
	}
	if number%3 == 2 {
		kinds[1].template = netDummy
	}
	return kinds
}

// interrupt has pods start and end, and the fault happen when the agent comes to the place.
func (b *bench) interrupt(ctx context.Context, p place, fault string, number int, kinds []kind) error {
	order := map[string]string{kill: crashpoint.Kill, stop: crashpoint.Stop, remove: crashpoint.Block}[fault]
	if p.after > 0 {
		order += " " + p.after.String()
	}
	var names []string
	var err error
	start := func() error {
		if p.vfio {
			kinds[0] = kind{template: "vfio", shape: shapes[number%3]}
		}
		names, err = b.createAll(ctx, kinds...)
		return err
	}
	switch p.when {
	case starting:
		if err := b.arm(ctx, p.point, order); err != nil {
			return err
		}
		if err := start(); err != nil {
			return err
		}
	case ending:
		if err := start(); err != nil {
			return err
		}
		if err := b.running(ctx, names...); err != nil {
			return err
		}
		if err := b.arm(ctx, p.point, order); err != nil {
			return err
		}
		if err := b.deleteNow(ctx, 1, names...); err != nil {
			return err
		}
	case booting:
		if err := b.endAgent(ctx); err != nil {
			return err
		}
		if err := b.arm(ctx, p.point, order); err != nil {
			return err
		}
		if !b.agentInPod {
			if err := b.StartAgent(ctx, b.node); err != nil {
				return err
			}
		}
	}
	if err := b.reached(ctx, p.point); err != nil {
		return err
	}
	if err := b.follow(ctx, p.point, fault, number); err != nil {
		return err
	}
	if p.when == starting {
		if err := b.running(ctx, names...); err != nil {
			return err
		}
		b.took = time.Since(b.faultAt) // the rest of the round is as any pod's
		if err := b.delete(ctx, 1, names...); err != nil {
			return err
		}
		return b.restored(ctx)
	}
	return b.gone(ctx, names...)
}

// follow is what becomes of the agent after the fault. Kubelet goes on meanwhile, for longer in some rounds than in others.
func (b *bench) follow(ctx context.Context, p crashpoint.Point, fault string, number int) error {
	away := time.Duration(number%3) * 2 * time.Second
	switch fault {
	case kill:
		if err := b.dead(ctx); err != nil {
			return err
		}
		time.Sleep(away)
		return b.startAgent(ctx)
	case stop:
		time.Sleep([]time.Duration{3 * time.Second, 10 * time.Second}[number/2%2]) // the runtime waits for 8 s
		if number%2 == 0 {
			return b.node.Signal(ctx, deploy.Agent, unix.SIGCONT)
		}
		if err := b.killAgent(ctx); err != nil {
			return err
		}
		return b.startAgent(ctx)
	}
	return b.deleteAgent(ctx, p, number)
}

// deleteAgent deletes the agent's pod while it is blocked at a point: in some rounds it goes on there when it has been asked
// to end, in others it is there until it is killed.
func (b *bench) deleteAgent(ctx context.Context, p crashpoint.Point, number int) error {
	old, err := b.agentPod(ctx)
	if err != nil {
		return err
	}
	options := metav1.DeleteOptions{}
	if number%2 == 1 {
		grace := int64(1)
		options.GracePeriodSeconds = &grace
	}
	if err := b.Client.CoreV1().Pods(system).Delete(ctx, old.Name, options); err != nil {
		return err
	}
	if number%2 == 0 {
		time.Sleep(time.Second) // until it has been asked to end
		if _, err := b.node.Run(ctx, fmt.Sprintf("rm -f %s/%s%s", crashDir, p, crashpoint.Reached)); err != nil {
			return err
		}
	}
	return b.eventually(ctx, "agent's pod", func(ctx context.Context) string {
		now, err := b.agentPod(ctx)
		if err != nil {
			return err.Error()
		}
		if now.UID == old.UID {
			return "is not gone"
		}
		return ""
	})
}

// endAgent ends the agent in order, so that another start of it follows.
func (b *bench) endAgent(ctx context.Context) error {
	if !b.agentInPod {
		_, err := b.node.Stop(ctx, deploy.Agent)
		return err
	}
	old, err := b.agentPod(ctx)
	if err != nil {
		return err
	}
	return b.Client.CoreV1().Pods(system).Delete(ctx, old.Name, metav1.DeleteOptions{})
}
