// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Offered answers whether a class matches nothing, or its devices are in use.
type Offered struct {
	// All are the driver's devices of all nodes.
	All int `json:"all"`
	// Matching are those that fit the class and the request.
	Matching int `json:"matching"`
	// InUse are matching ones that claims have, Tainted those that are kept from new claims, Free the rest.
	InUse   int `json:"inUse"`
	Tainted int `json:"tainted"`
	Free    int `json:"free"`
	// FreeOn is the number of nodes with free ones.
	FreeOn int `json:"freeOn"`
	// Error is the first error of a selector, which the scheduler meets too.
	Error string `json:"error,omitempty"`
	// NoClass says that the class does not exist.
	NoClass bool `json:"noClass,omitempty"`
}

// counting counts the devices for one request.
type counting struct {
	request   *Request
	selectors []cel.CompilationResult
	nodes     map[string]bool
}

// count counts the driver's devices for the requests of claims that are allotted nothing.
func (t *teller) count(ctx context.Context) {
	var all []*counting
	for i := range t.Claims {
		claim := t.claims[t.Claims[i].PodClaim]
		if claim == nil || claim.Status.Allocation != nil {
			continue
		}
		for j := range t.Claims[i].Requests {
			c, err := t.newCounting(ctx, &t.Claims[i].Requests[j])
			if err != nil {
				t.unread("device class "+t.Claims[i].Requests[j].Class, err)
				continue
			}
			all = append(all, c)
		}
	}
	if len(all) == 0 {
		return
	}
	drivers := t.drivers
	if nodes, err := t.readNodes(ctx, ""); err == nil && t.Pod.Node == "" {
		drivers = nodes.drivers()
		t.drivers = drivers
	}
	uses, err := t.uses(ctx, "", drivers)
	if err != nil {
		t.unread("which devices other claims have", err)
		return
	}
	for _, driver := range drivers {
		err := t.slices(ctx, driver, "", func(slice *resourceapi.ResourceSlice) {
			for _, d := range slice.Spec.Devices {
				_, inUse := uses[key{driver, slice.Spec.Pool.Name, d.Name}]
				for _, c := range all {
					c.add(ctx, slice, &d, inUse)
				}
			}
		})
		if err != nil {
			t.unread("which devices there are", err)
			for _, c := range all {
				c.request.Offered = nil
			}
			return
		}
	}
}

func (t *teller) newCounting(ctx context.Context, r *Request) (*counting, error) {
	r.Offered = &Offered{}
	c := &counting{request: r, nodes: map[string]bool{}}
	class, err := t.kube.ResourceV1().DeviceClasses().Get(ctx, r.Class, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		r.Offered.NoClass = true
		return c, nil
	}
	if err != nil {
		r.Offered = nil
		return nil, explain("get device class", err)
	}
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true})
	var expressions []string
	for _, s := range class.Spec.Selectors {
		if s.CEL != nil {
			expressions = append(expressions, s.CEL.Expression)
		}
	}
	for _, expression := range append(expressions, r.Selectors...) {
		compiled := compiler.CompileCELExpression(expression, cel.Options{DisableCostEstimation: true})
		if compiled.Error != nil {
			r.Offered.Error = compiled.Error.Error()
		}
		c.selectors = append(c.selectors, compiled)
	}
	return c, nil
}

// add counts one device.
func (c *counting) add(ctx context.Context, slice *resourceapi.ResourceSlice, d *resourceapi.Device, inUse bool) {
	o := c.request.Offered
	o.All++
	if o.NoClass || o.Error != "" {
		return
	}
	for _, s := range c.selectors {
		matches, _, err := s.DeviceMatches(ctx, cel.Device{
			Driver: slice.Spec.Driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
		})
		if err != nil {
			o.Error = fmt.Sprintf("device %s of pool %s: %v", d.Name, slice.Spec.Pool.Name, err)
			return
		}
		if !matches {
			return
		}
	}
	o.Matching++
	switch {
	case inUse:
		o.InUse++
	case c.isKeptAway(d):
		o.Tainted++
	default:
		o.Free++
		if node := slice.Spec.NodeName; node != nil && !c.nodes[*node] {
			c.nodes[*node] = true
			o.FreeOn++
		}
	}
}

// isKeptAway says whether a taint that the request does not tolerate keeps the device from it.
func (c *counting) isKeptAway(d *resourceapi.Device) bool {
taints:
	for _, taint := range d.Taints {
		if taint.Effect != resourceapi.DeviceTaintEffectNoSchedule && taint.Effect != resourceapi.DeviceTaintEffectNoExecute {
			continue
		}
		for _, toleration := range c.request.tolerations {
			if resourceclaim.ToleratesTaint(toleration, taint) {
				continue taints
			}
		}
		return true
	}
	return false
}
