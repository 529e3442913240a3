// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// page is a story for people. What it writes of the cluster is safe to be shown.
type page struct {
	io.Writer
	wide bool
	now  time.Time
}

// line writes one line; texts among the arguments are made safe.
func (p page) line(format string, args ...any) {
	for i, a := range args {
		if text, ok := a.(string); ok {
			args[i] = safe(text)
		}
	}
	fmt.Fprintf(p.Writer, format+"\n", args...)
}

// story prints a story.
func (p *printing) story(streams genericiooptions.IOStreams, s *Story) error {
	if printed, err := p.object(streams.Out, s); printed {
		return err
	}
	var out bytes.Buffer
	to := page{&out, p.output == "wide", p.now()}
	to.pod(s)
	for i := range s.Claims {
		to.claim(&s.Claims[i])
	}
	for i := range s.Networks {
		to.network(&s.Networks[i])
	}
	to.node(s.Node)
	to.events(s.Events)
	to.missing(s)
	_, err := out.WriteTo(streams.Out)
	return err
}

func (p page) pod(s *Story) {
	where := ", on no node yet"
	if s.Pod.Node != "" {
		where = " on " + s.Pod.Node
	}
	p.line("Pod %s/%s: %s%s", s.Pod.Namespace, s.Pod.Name, s.Pod.Phase, where)
	for _, w := range s.Pod.Waiting {
		p.line("  waits    %s", w)
	}
}

func (p page) claim(c *ClaimState) {
	from := ""
	switch {
	case c.Name == "":
		from = "not made yet, template " + c.Template
	case c.Template != "":
		from = c.Name + ", from template " + c.Template
	default:
		from = c.Name
	}
	p.line("\nClaim %s: %s", c.PodClaim, from)
	p.line("  for      %s", list(c.Containers, "container", "no container"))
	for _, r := range c.Requests {
		count := fmt.Sprintf("%d of", r.Count)
		if r.Count == 0 {
			count = "all of"
		}
		p.line("  asked    request %s: %s class %s", r.Name, count, r.Class)
		for _, s := range r.Selectors {
			p.line("           where %s", strings.Join(strings.Fields(s), " "))
		}
		if o := r.Offered; o != nil && !o.NoClass && o.Error == "" {
			p.line("           of %d devices %d match: %d in use, %d tainted, %d free on %d nodes", o.All, o.Matching, o.InUse, o.Tainted,
				o.Free, o.FreeOn)
		}
	}
	for _, v := range c.Parameters {
		p.line("  asked    by %s, for %s, of driver %s: %s", v.Source, list(v.Requests, "request", "all requests"), v.Driver, oneLine(v))
	}
	if len(c.Devices) == 0 {
		p.line("  allotted nothing")
	}
	for i := range c.Devices {
		p.device(&c.Devices[i])
	}
	if len(c.ReservedFor) > 0 {
		p.line("  reserved for %s", list(c.ReservedFor, "pod", ""))
	}
}

func (p page) device(d *Device) {
	p.line("  allotted %s of pool %s on %s, for request %s", d.Device, cmp.Or(d.Pool, "-"), cmp.Or(d.Node, "-"), d.Use.Request)
	if p.wide {
		p.line("           driver %s, manager %s, PF %s, on the host %s", d.Driver, cmp.Or(d.Manager, "-"), cmp.Or(d.PF, "-"),
			cmp.Or(d.HostInterface, "-"))
	}
	p.line("  status   %s", strings.TrimSuffix(d.State+": "+d.Use.Message, ": "))
	if u := d.Use; u.Interface != "" {
		p.line("           interface %s, MAC %s, addresses %s", u.Interface, cmp.Or(u.MAC, "-"), cmp.Or(strings.Join(u.Addresses, ", "), "-"))
	}
	if u := d.Use; u.Network != "" || u.VLAN != 0 {
		p.line("           network %s, VLAN %d", cmp.Or(u.Network, "-"), u.VLAN)
	}
	p.line("  health   %s", d.health())
}

func (p page) network(n *NetworkState) {
	if !n.Found {
		p.line("\nNetwork %s: not found", n.Name)
		return
	}
	p.line("\nNetwork %s: VLAN %d, pools %s, %d addresses used, %d free", n.Name, n.VLAN, cmp.Or(strings.Join(n.Pools, ", "), "all"),
		n.Used, n.Free)
	p.conditions(n.Conditions)
	for _, a := range n.Addresses {
		p.line("  address  %s, %s on %s", a.Address, a.State, a.Node)
	}
}

func (p page) node(n *NodeState) {
	if n == nil {
		return
	}
	p.line("\nNode %s: driver %s", n.Name, n.Driver)
	p.conditions(n.Conditions)
}

func (p page) conditions(conditions []metav1.Condition) {
	for _, c := range conditions {
		p.line("  %s %s (%s): %s", c.Type, string(c.Status), c.Reason, c.Message)
	}
}

func (p page) events(events []Event) {
	if len(events) == 0 {
		return
	}
	p.line("\nEvents, the latest last:")
	for _, e := range events {
		p.line("  %s ago  %s  %s  %s (x%d, %s): %s", duration.HumanDuration(p.now.Sub(e.Last.Time)), e.Type, e.Object, e.Reason, e.Count,
			e.From, e.Message)
	}
}

func (p page) missing(s *Story) {
	for _, u := range s.Unread {
		p.line("\nNot told: %s", u)
	}
	if len(s.Missing) == 0 {
		if len(s.Unread) == 0 {
			p.line("\nNothing is missing.")
		}
		return
	}
	p.line("\nWhat is missing, and what to do:")
	for i, m := range s.Missing {
		p.line("%d. %s", i+1, m.What)
		p.line("   -> %s", m.Do)
		if m.See != "" {
			p.line("   see Documentation/%s", m.See)
		}
	}
}

func list(names []string, what, none string) string {
	switch len(names) {
	case 0:
		return none
	case 1:
		return what + " " + names[0]
	}
	return what + "s " + strings.Join(names, ", ")
}

// oneLine returns parameters without blanks.
func oneLine(p Parameter) string {
	var out bytes.Buffer
	if p.Values == nil || json.Compact(&out, p.Values.Raw) != nil {
		return "not JSON"
	}
	return out.String()
}
