// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

var addressObjects = schema.GroupVersionResource{Group: v2alpha1.GroupName, Version: "v2alpha1", Resource: v2alpha1.AddressResource}

// owners returns which node the addresses are given to, by the objects of all networks.
func (b *bench) owners(ctx context.Context) (map[netip.Addr]string, error) {
	list, err := b.Dynamic.Resource(addressObjects).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	owners := map[netip.Addr]string{}
	for _, item := range list.Items {
		var object v2alpha1.CiliumNetworkDriverAddress
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(item.Object, &object); err != nil {
			return nil, err
		}
		addr, err := netip.ParseAddr(object.Spec.Address)
		if err != nil {
			return nil, err
		}
		owners[addr] = object.Spec.Node
	}
	return owners, nil
}

// addresses returns those that are given to the node.
func (b *bench) addresses(ctx context.Context) ([]netip.Addr, error) {
	owners, err := b.owners(ctx)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(owners, func(_ netip.Addr, node string) bool { return node != b.node.Name() })
	return slices.SortedFunc(maps.Keys(owners), netip.Addr.Compare), nil
}

// holder is a pod's network namespace that has an address.
type holder struct{ node, netns string }

// span is a time in which a holder had an address without doubt.
type span struct{ from, to time.Time }

// addressWatch looks again and again which network namespaces have which addresses. No address may be in two at one time, and
// none may be in one while it is not given to the node.
type addressWatch struct {
	benches []*bench
	// looks is how often it looked, and most how many addresses it saw at one time.
	looks, most int
	spans       map[netip.Addr]map[holder]*span
	wrong       map[string]bool
}

func newAddressWatch(benches ...*bench) *addressWatch {
	return &addressWatch{benches: benches, spans: map[netip.Addr]map[holder]*span{}, wrong: map[string]bool{}}
}

// showAddresses prints for each namespace a line with its name and one of JSON.
const showAddresses = `for f in /run/netns/*; do n=${f##*/}; a=$(ip -j -n $n addr show dev ` + ifName + ` 2>/dev/null) && echo $n && echo $a; done; true`

// look looks once.
func (w *addressWatch) look(ctx context.Context) error {
	before, err := w.benches[0].owners(ctx)
	if err != nil {
		return err
	}
	seen := map[holder][]netip.Addr{}
	count := 0
	for _, b := range w.benches {
		from := time.Now()
		out, err := b.node.Run(ctx, showAddresses)
		if err != nil {
			return err
		}
		to := time.Now()
		found, err := parseAddresses(out)
		if err != nil {
			return fmt.Errorf("addresses on %s: %w", b.node.Name(), err)
		}
		for netns, addrs := range found {
			h := holder{b.node.Name(), netns}
			seen[h] = addrs
			count += len(addrs)
			w.note(h, addrs, from, to)
		}
	}
	after, err := w.benches[0].owners(ctx)
	if err != nil {
		return err
	}
	w.looks++
	w.most = max(w.most, count)
	w.compare(seen, before, after)
	return nil
}

// note extends the times of the holder's addresses, and begins those of new ones: it had them at some time from from to to.
func (w *addressWatch) note(h holder, addrs []netip.Addr, from, to time.Time) {
	for _, addr := range addrs {
		holders := w.spans[addr]
		if holders == nil {
			holders = map[holder]*span{}
			w.spans[addr] = holders
		}
		if s := holders[h]; s != nil {
			s.to = from
		} else {
			holders[h] = &span{from: to, to: from}
		}
		for other, s := range holders {
			if mine := holders[h]; other != h && s.from.Before(mine.to) && mine.from.Before(s.to) {
				w.wrong[fmt.Sprintf("address %s was in TWO PODS at one time: %v and %v", addr, h, other)] = true
			}
		}
	}
}

// compare compares what was seen with the objects before and after it.
func (w *addressWatch) compare(seen map[holder][]netip.Addr, before, after map[netip.Addr]string) {
	for h, addrs := range seen {
		for _, addr := range addrs {
			if before[addr] != h.node && after[addr] != h.node {
				w.wrong[fmt.Sprintf("address %s was in a pod on %s WITHOUT BEING GIVEN to the node: before it was of %q, after of %q",
					addr, h.node, before[addr], after[addr])] = true
			}
		}
	}
}

// verdict is what was wrong.
func (w *addressWatch) verdict() error {
	var errs []error
	for _, what := range slices.Sorted(maps.Keys(w.wrong)) {
		errs = append(errs, errors.New(what))
	}
	return errors.Join(errs...)
}

// parseAddresses reads what showAddresses prints. Link-local addresses are nobody's choice.
func parseAddresses(out string) (map[string][]netip.Addr, error) {
	found := map[string][]netip.Addr{}
	netns := ""
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "[") {
			netns = line
			continue
		}
		var links []struct {
			Addresses []struct {
				Local netip.Addr `json:"local"`
			} `json:"addr_info"`
		}
		if err := json.Unmarshal([]byte(line), &links); err != nil {
			return nil, err
		}
		for _, link := range links {
			for _, a := range link.Addresses {
				if a.Local.IsValid() && !a.Local.IsLinkLocalUnicast() {
					found[netns] = append(found[netns], a.Local)
				}
			}
		}
	}
	return found, nil
}
