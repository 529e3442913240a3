// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"unique"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// APIVersion is that of what -o json and -o yaml print.
const APIVersion = "ndev.networkdriver.cilium.io/v1alpha1"

// What is said of a device that no claim's status says anything of.
const (
	// StateFree is that of a device that no claim is allotted.
	StateFree = "Free"
	// StateAllotted is that of one which the node has not prepared yet.
	StateAllotted = "Allotted"
	// StateNotOffered is that of one which the node deliberately does not offer.
	StateNotOffered = "NotOffered"
)

// conditionReady is the condition of a claim's device that says how far it is on its way into the pod.
const conditionReady = "Ready"

// passing are the reasons for which a device is not Ready without anything being wrong.
var passing = []string{"Prepared", "Releasing"}

// Options select devices. Empty ones select all.
type Options struct {
	Node, Pool, Network string
	// Namespace is that of the claims.
	Namespace string
	// Driver is the driver's name.
	Driver string
	// Unhealthy selects those that something is wrong with.
	Unhealthy bool
}

// DeviceList is what kubectl ndev prints.
type DeviceList struct {
	metav1.TypeMeta `json:",inline"`

	Items []Device `json:"items"`
	// Unread is what could not be read, and so is not told.
	Unread []string `json:"unread,omitempty"`
}

// DeepCopyObject implements [runtime.Object]. Printers do not change what they print: the items are the same.
func (l *DeviceList) DeepCopyObject() runtime.Object {
	c := *l
	return &c
}

// Device is a device that a node offers, deliberately does not offer, or has given to a claim.
type Device struct {
	Node string `json:"node"`
	// Pool is the configured name of the pool, empty for a device that is not offered.
	Pool   string `json:"pool,omitempty"`
	Device string `json:"device"`
	Driver string `json:"driver"`
	// Manager is the device manager.
	Manager string `json:"manager,omitempty"`
	// PF is the kernel name of a VF's PF, and HostInterface the device's own on the host.
	PF            string `json:"pf,omitempty"`
	HostInterface string `json:"hostInterface,omitempty"`
	// State is Free, Allotted, NotOffered, or what the node says in the claim's status: Prepared, Attached, Moved, Releasing, Failed.
	State string `json:"state"`
	// Reason says why, for NotOffered.
	Reason string `json:"reason,omitempty"`
	// Use is what the device is used for, nil for nothing.
	Use *Use `json:"use,omitempty"`
	// Problems are what is wrong with it.
	Problems []Problem `json:"problems,omitempty"`
}

// Use is what a claim has a device for.
type Use struct {
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	Request   string `json:"request"`
	// Pod is the pod that has the device or will have it, Waiting are others that the claim is reserved for.
	Pod     string   `json:"pod,omitempty"`
	Waiting []string `json:"waiting,omitempty"`
	// Interface, MAC and Addresses are those in the pod.
	Interface string   `json:"interface,omitempty"`
	MAC       string   `json:"mac,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
	// Network is the network that the device has joined.
	Network string `json:"network,omitempty"`
	VLAN    int    `json:"vlan,omitempty"`
	// Message is what the node says of it.
	Message string `json:"message,omitempty"`

	state    string
	problems []Problem
}

// Problem is something that is wrong with a device.
type Problem struct {
	// Kind is taint, condition, agent or slice.
	Kind string `json:"kind"`
	// Name is the taint's key or the condition's type.
	Name string `json:"name"`
	// Value is the taint's value, or the condition's reason.
	Value string `json:"value,omitempty"`
	// Effect is the taint's effect, or the condition's status.
	Effect  string      `json:"effect,omitempty"`
	Message string      `json:"message,omitempty"`
	Since   metav1.Time `json:"since,omitzero"`
}

// String returns the problem in a word.
func (p Problem) String() string {
	switch p.Kind {
	case "taint":
		if p.Value != "" {
			return p.Name + "=" + p.Value + ":" + p.Effect
		}
		return p.Name + ":" + p.Effect
	case "slice":
		return "withdrawn"
	}
	return p.Name + "=" + p.Effect + "(" + p.Value + ")"
}

// key is what the scheduler tells a device by.
type key struct{ driver, pool, device string }

// devices joins slices, claims and node configs.
func (c *cluster) devices(ctx context.Context, o Options) (*DeviceList, error) {
	list := &DeviceList{TypeMeta: metav1.TypeMeta{APIVersion: APIVersion, Kind: "DeviceList"}, Items: []Device{}}
	nodes, err := c.readNodes(ctx, o.Node)
	if err != nil {
		list.Unread = append(list.Unread, "whether the nodes' agents are at work, and what they do not offer: "+err.Error())
	}
	drivers := nodes.drivers()
	if o.Driver != "" {
		drivers = []string{o.Driver}
	}

	// Claims first: of a device that is not selected nothing is kept then.
	uses, err := c.uses(ctx, o.Namespace, drivers)
	if err != nil {
		return nil, err
	}
	add := func(d Device) {
		if agent := nodes[d.Node]; agent != nil && agent.problem != nil {
			d.Problems = append(d.Problems, *agent.problem)
		}
		if o.selects(&d) {
			list.Items = append(list.Items, d)
		}
	}
	for _, driver := range drivers {
		if err := c.slices(ctx, driver, o.Node, func(slice *resourceapi.ResourceSlice) {
			for _, offer := range offersOf(slice) {
				k := key{offer.Driver, offer.published, offer.Device.Device}
				add(offer.with(uses[k]))
				delete(uses, k)
			}
		}); err != nil {
			return nil, err
		}
	}
	for k, use := range uses {
		add(withdrawn(k, use))
	}
	for _, node := range nodes {
		for _, d := range node.skipped {
			if o.Driver == "" || o.Driver == d.Driver {
				add(d)
			}
		}
	}
	slices.SortFunc(list.Items, func(a, b Device) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Driver, b.Driver))
	})
	return list, nil
}

func (o *Options) selects(d *Device) bool {
	return (o.Node == "" || d.Node == o.Node) &&
		(o.Pool == "" || d.Pool == o.Pool) &&
		(o.Namespace == "" || d.Use != nil) &&
		(o.Network == "" || d.Use != nil && d.Use.Network == o.Network) &&
		(!o.Unhealthy || len(d.Problems) > 0)
}

// agent is what is known of a node by its config.
type agent struct {
	driver  string
	problem *Problem
	skipped []Device
}

type agents map[string]*agent

// drivers are the names under which the nodes' agents publish devices.
func (a agents) drivers() []string {
	names := map[string]bool{v2alpha1.DefaultDriverName: true}
	for _, agent := range a {
		names[agent.driver] = true
	}
	return slices.Sorted(maps.Keys(names))
}

func (c *cluster) readNodes(ctx context.Context, node string) (agents, error) {
	nodes := agents{}
	err := c.nodeConfigs(ctx, node, func(config *v2alpha1.CiliumNetworkDriverNodeConfig) {
		nodes[config.Name] = agentOf(config)
	})
	return nodes, err
}

func agentOf(config *v2alpha1.CiliumNetworkDriverNodeConfig) *agent {
	a := &agent{driver: same(driverOf(config))}
	switch ready := meta.FindStatusCondition(config.Status.Conditions, v2alpha1.ConditionReady); {
	case ready == nil:
		a.problem = &Problem{Kind: "agent", Name: "agent", Effect: "Unknown", Value: "NotSeen",
			Message: "no agent has said anything about the node's config"}
	case ready.Status != metav1.ConditionTrue:
		a.problem = &Problem{
			Kind: "agent", Name: "agent", Effect: string(ready.Status), Value: ready.Reason, Message: ready.Message,
			Since: ready.LastTransitionTime,
		}
	}
	for _, s := range config.Status.SkippedDevices {
		a.skipped = append(a.skipped, Device{
			Node: config.Name, Device: s.Device, Driver: a.driver, Manager: same(s.Manager), State: StateNotOffered, Reason: s.Reason,
		})
	}
	return a
}

// driverOf returns the driver's name in use, which differs from the configured one until the agent is restarted.
func driverOf(config *v2alpha1.CiliumNetworkDriverNodeConfig) string {
	return cmp.Or(config.Status.DriverName, config.Spec.DriverName, v2alpha1.DefaultDriverName)
}

// slices visits the driver's, of one node if that is not empty.
func (c *cluster) slices(ctx context.Context, driver, node string, visit func(*resourceapi.ResourceSlice)) error {
	selector := fields.Set{resourceapi.ResourceSliceSelectorDriver: driver}
	if node != "" {
		selector[resourceapi.ResourceSliceSelectorNodeName] = node
	}
	return each(ctx, "ResourceSlices", metav1.ListOptions{FieldSelector: fields.SelectorFromSet(selector).String()},
		func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return c.kube.ResourceV1().ResourceSlices().List(ctx, options)
		}, visit)
}

// offer is a device as a slice has it.
type offer struct {
	Device
	// published is the pool's name in the slice.
	published string
}

func offersOf(slice *resourceapi.ResourceSlice) []offer {
	offers := make([]offer, 0, len(slice.Spec.Devices))
	node, driver, published := "", same(slice.Spec.Driver), same(slice.Spec.Pool.Name)
	if slice.Spec.NodeName != nil {
		node = same(*slice.Spec.NodeName)
	}
	_, configured := split(published)
	for _, d := range slice.Spec.Devices {
		text := func(name resourceapi.QualifiedName) string {
			if value := d.Attributes[name].StringValue; value != nil {
				return *value
			}
			return ""
		}
		o := offer{published: published, Device: Device{
			Node: node, Pool: same(cmp.Or(text("pool"), configured)), Device: d.Name, Driver: driver,
			Manager: same(text("deviceManager")), PF: same(text("pfName")), HostInterface: cmp.Or(text("kernelIfName"), text("ifName")),
		}}
		for _, t := range d.Taints {
			p := Problem{Kind: "taint", Name: same(t.Key), Value: same(t.Value), Effect: string(t.Effect)}
			if t.TimeAdded != nil {
				p.Since = *t.TimeAdded
			}
			o.Problems = append(o.Problems, p)
		}
		offers = append(offers, o)
	}
	return offers
}

func (o offer) with(use *Use) Device {
	d := o.Device
	d.State = StateFree
	if use != nil {
		d.Use, d.State = use, use.state
		d.Problems = append(d.Problems, use.problems...)
	}
	return d
}

// withdrawn is a claim's device that no slice has any more.
func withdrawn(k key, use *Use) Device {
	node, pool := split(k.pool)
	return Device{
		Node: node, Pool: pool, Device: k.device, Driver: k.driver, State: use.state, Use: use,
		Problems: append([]Problem{{Kind: "slice", Name: "withdrawn", Message: "a claim has the device, but the node does not offer it any " +
			"more"}},
			use.problems...),
	}
}

// split takes the name of a pool in a slice apart: it begins with that of the node.
func split(published string) (node, pool string) {
	node, pool, ok := strings.Cut(published, "/")
	if !ok {
		return "", published
	}
	return node, pool
}

// uses returns what the drivers' devices are used for by the claims of the namespace, or of all of them where it is empty.
func (c *cluster) uses(ctx context.Context, namespace string, drivers []string) (map[key]*Use, error) {
	uses := map[key]*Use{}
	err := c.claims(ctx, namespace, func(claim *resourceapi.ResourceClaim) {
		for k, use := range usesOf(claim) {
			if slices.Contains(drivers, k.driver) {
				uses[k] = use
			}
		}
	})
	return uses, err
}

func (c *cluster) claims(ctx context.Context, namespace string, visit func(*resourceapi.ResourceClaim)) error {
	return each(ctx, "ResourceClaims", metav1.ListOptions{}, func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return c.kube.ResourceV1().ResourceClaims(namespace).List(ctx, options)
	}, visit)
}

// usesOf returns what the claim has devices for. Those that it only watches, with admin access, are not its own.
func usesOf(claim *resourceapi.ResourceClaim) map[key]*Use {
	if claim.Status.Allocation == nil {
		return nil
	}
	uses := make(map[key]*Use, len(claim.Status.Allocation.Devices.Results))
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.AdminAccess != nil && *r.AdminAccess {
			continue
		}
		use := &Use{Namespace: same(claim.Namespace), Claim: claim.Name, Request: same(r.Request), state: StateAllotted}
		var holder string
		for i := range claim.Status.Devices {
			if s := &claim.Status.Devices[i]; s.Driver == r.Driver && s.Pool == r.Pool && s.Device == r.Device && s.ShareID == nil {
				holder = use.read(s)
			}
		}
		for _, consumer := range claim.Status.ReservedFor {
			switch {
			case consumer.Resource != "pods":
			case use.Pod == "" && (holder == "" || holder == string(consumer.UID)):
				use.Pod = consumer.Name
			default:
				use.Waiting = append(use.Waiting, consumer.Name)
			}
		}
		uses[key{same(r.Driver), same(r.Pool), r.Device}] = use
	}
	return uses
}

// read takes what the node says of the device, and returns the UID of the pod that it was prepared for, if that is known.
func (u *Use) read(s *resourceapi.AllocatedDeviceStatus) (holder string) {
	if n := s.NetworkData; n != nil {
		u.Interface, u.MAC, u.Addresses = n.InterfaceName, n.HardwareAddress, n.IPs
	}
	for _, c := range s.Conditions {
		if c.Type == conditionReady {
			u.state, u.Message = same(c.Reason), same(c.Message)
		}
		if c.Status == metav1.ConditionTrue || c.Type == conditionReady && slices.Contains(passing, c.Reason) {
			continue
		}
		u.problems = append(u.problems, Problem{
			Kind: "condition", Name: c.Type, Value: c.Reason, Effect: string(c.Status), Message: c.Message, Since: c.LastTransitionTime,
		})
	}
	r := recordOf(s)
	u.Network = same(r.Config.Network)
	switch {
	case r.Config.Joined != nil:
		u.VLAN = r.Config.Joined.VLAN
	case r.Config.Vlan != nil:
		u.VLAN = *r.Config.Vlan
	}
	return r.PodUID
}

// record is what is told of the driver's own record of a device. Whoever may write the claim's status may write that.
type record struct {
	PodUID string `json:"podUID"`
	Config struct {
		Network string `json:"network"`
		Vlan    *int   `json:"vlan"`
		Joined  *struct {
			VLAN int `json:"vlan"`
		} `json:"joined"`
	} `json:"config"`
}

// recordOf reads the record as far as it is one.
func recordOf(s *resourceapi.AllocatedDeviceStatus) (r record) {
	if s.Data != nil && json.Unmarshal(s.Data.Raw, &r) != nil {
		return record{}
	}
	return r
}

// same keeps one copy of a text that many objects have, each decoded on its own.
func same(text string) string { return unique.Make(text).Value() }
